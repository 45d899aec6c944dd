.PHONY: install fast test coverage docs pages site bench mutate release

install:
	pip install -c constraints.txt -e ".[dev]"

fast:
	pytest -q -m "not slow" tests/test_*.py tests/model structlin

test:
	ruff check . && ruff format --check . && mypy && pytest

coverage:
	pytest -q --cov=structlin --cov-report=term-missing:skip-covered

docs:
	pytest -q tests/test_readme.py tests/test_pages.py structlin

pages:
	python -m benchmarks.pages

site:
	mkdocs build --strict

bench:
	for f in examples/[a-z]*.py examples/*/[a-z]*.py; do ! grep -q '^if __name__' $$f || python $$f --smoke || exit 1; done
	for f in benchmarks/[a-z]*.py benchmarks/*/[a-z]*.py; do ! grep -q '^if __name__' $$f || python -m $$(echo $${f%.py} | tr / .) --smoke || exit 1; done

mutate:
	mkdir -p out && rm -f out/mutants.sqlite
	cosmic-ray init tests/cosmic-ray.toml out/mutants.sqlite
	cr-filter-git --config tests/cosmic-ray.toml out/mutants.sqlite
	cosmic-ray exec tests/cosmic-ray.toml out/mutants.sqlite
	cr-report out/mutants.sqlite

release:
	python -m tools.release
