// What the pages do beyond their theme: code is copied by a click, the search works from a disk,
// and a reader chooses among the versions that lie beside this one.

/** What a reader would type of a block of code: no prompts, no output. */
function findTyped(text, language) {
  const lines = text.replace(/\s+$/, "").split("\n");
  const typed = [];
  let goesOn = false; // the line before this one ended in a backslash
  for (const line of lines) {
    if (language === "pycon") {
      if (/^(>>>|\.\.\.)( |$)/.test(line)) typed.push(line.slice(4));
    } else if (language === "console") {
      if (goesOn || line.startsWith("$ ")) {
        typed.push(goesOn ? line : line.slice(2));
        goesOn = line.endsWith("\\");
      }
    } else {
      typed.push(line);
    }
  }
  return typed.join("\n").replace(/\s+$/, "") + "\n";
}

/** Put text on the clipboard, also where a page from http:// may not use the newer way. */
async function copyText(text) {
  if (navigator.clipboard) {
    try {
      return await navigator.clipboard.writeText(text);
    } catch { /* not allowed here */ }
  }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser allows no copying");
}

/** Every block of code that somebody could type gets a button. Signatures and text do not. */
function addCopyButtons() {
  for (const block of document.querySelectorAll("div.highlight:not(.doc-signature)")) {
    const language = /language-(\w+)/.exec(block.className)?.[1];
    if (!language || language === "text") continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.onclick = async () => {
      const text = findTyped(block.querySelector("pre").textContent, language);
      button.textContent = await copyText(text).then(() => "Copied", () => "Not copied");
      setTimeout(() => (button.textContent = "Copy"), 2000);
    };
    block.append(button);
  }
}

/** A browser gives pages from a disk no workers and no JSON. This stands in for the worker of
 * mkdocs' search, with the same messages: it takes the library and the index as scripts. */
class DiskSearch {
  async postMessage(message) {
    if (message.init) {
      for (const name of ["lunr.js", "search_index.js"]) await addScript(`search/${name}`);
      const index = window.searchIndex;
      this.documents = new Map(index.docs.map((page) => [page.location, page]));
      lunr.tokenizer.separator = new RegExp(index.config.separator);
      this.index = lunr(function () {
        this.ref("location");
        this.field("title");
        this.field("text");
        index.docs.forEach((page) => this.add(page));
      });
      this.onmessage({ data: { config: index.config } });
      this.onmessage({ data: { allowSearch: true } });
    } else if (message.query) {
      const found = this.index.search(message.query).map((hit) => this.documents.get(hit.ref));
      const results = found.map((page) => ({ ...page, summary: page.text.slice(0, 200) }));
      this.onmessage({ data: { results } });
    }
  }
}

/** Load a script of the site. */
function addScript(path) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `${base_url}/${path}`;
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  });
}

/** Where several versions lie side by side, the version becomes a choice. */
function offerVersions() {
  const label = document.getElementById("version");
  if (!window.versions || versions.length < 2) return;
  const choice = document.createElement("select");
  choice.className = "form-select form-select-sm";
  choice.ariaLabel = "version";
  for (const each of versions) choice.add(new Option(each, each));
  choice.value = label.dataset.version;
  choice.onchange = () => (location.href = `${base_url}/../${choice.value}/index.html`);
  label.replaceChildren(choice);
}

if (typeof document === "undefined") {
  module.exports = { findTyped };
} else {
  if (location.protocol === "file:") window.Worker = DiskSearch;
  addCopyButtons();
  offerVersions();
}
