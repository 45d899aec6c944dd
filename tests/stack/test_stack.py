"""The rest of a user's stack on tiny models: compile, export, ONNX, checkpointing, distributed,
torch.func, PEFT."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from structlin import BTT, StructuredLinear, convert, densify
from tests.models import GPT

# torch, onnx and torchao warn about themselves when they compile, export and quantise.
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:(torch|onnx|peft|transformers|copyreg).*",
)
TOKENS = torch.arange(24).reshape(2, 12)


def small() -> GPT:
    return convert(GPT(width=32), BTT(rank=2))


def loss_of(model: nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@OWN_WARNINGS
def test_export_keeps_the_function_for_every_batch_size():
    model = small().eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (TOKENS,), dynamic_shapes=({0: batch},)).module()
    for size in (2, 7):
        tokens = TOKENS[:1].expand(size, -1)
        torch.testing.assert_close(exported(tokens), model(tokens))


@OWN_WARNINGS
@pytest.mark.parametrize("weight_norm", [False, True])
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # a check of x is not in the file
def test_onnx_runs_in_onnxruntime_for_every_batch_size(tmp_path, dynamo, weight_norm):
    for package in ("onnx", "onnxscript", "onnxruntime")[:: 1 if dynamo else 2]:
        pytest.importorskip(package)
    import onnxruntime

    layers = (nn.Linear(36, 64), nn.GELU(), nn.Linear(64, 36))
    model = convert(nn.Sequential(*layers), BTT(rank=2), weight_norm=weight_norm).eval()
    options = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
    if not dynamo:
        options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    path = tmp_path / "m.onnx"
    torch.onnx.export(model, (torch.randn(3, 36),), path, dynamo=dynamo, **options)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in (3, 8):
        x = torch.randn(size, 36)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), model(x).detach(), atol=1e-5, rtol=1e-4)


def test_per_sample_gradients_of_torch_func_sum_to_the_gradient():
    layer, x = StructuredLinear(16, 12, BTT(rank=2), weight_norm=True), torch.randn(5, 16)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        assert each[name].shape == (5, *parameter.shape)
        torch.testing.assert_close(each[name].sum(0), parameter.grad, atol=1e-4, rtol=1e-4)


def test_generation_with_a_cache_is_that_without():
    pytest.importorskip("transformers")
    from benchmarks.zoo import llama

    model = convert(llama(), BTT(rank=2)).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    with_cache, without = (
        model.generate(TOKENS, use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


@OWN_WARNINGS
def test_lora_on_the_dense_layers_trains_and_merges():
    peft = pytest.importorskip("peft")
    from benchmarks.zoo import llama

    model = convert(llama(), BTT(rank=2), include="ffn")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    expected = wrapped.eval()(TOKENS).logits
    wrapped(TOKENS, labels=TOKENS).loss.backward()
    merged = wrapped.merge_and_unload()
    assert isinstance(merged.model.layers[0].mlp.up_proj, StructuredLinear)
    torch.testing.assert_close(merged(TOKENS).logits, expected, atol=1e-5, rtol=1e-4)


@OWN_WARNINGS
def test_the_recipe_of_the_page_heals_structured_layers_by_lora(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    from benchmarks.zoo import llama

    page = (Path(__file__).parents[2] / "docs/compress.md").read_text(encoding="utf-8")
    recipe = page.split("```python\nimport peft")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    teacher = llama()
    small = convert(copy.deepcopy(teacher), BTT(rank=1), init="project")
    before = {name: value.clone() for name, value in small.named_parameters()}
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    names = {"small": small, "trained": teacher, "batches": [batch]}
    exec("import peft" + recipe, names)
    healed, losses = names["adapted"], names["losses"]
    assert losses[-1] < losses[0] / 2
    layer = healed.base_model.model.model.layers[0].mlp.up_proj
    assert isinstance(layer.base_layer, StructuredLinear)
    for name, value in healed.unload().named_parameters():
        assert torch.equal(value, before[name])  # the cores were frozen
    config = peft.LoraConfig.from_pretrained("adapters")
    config._register_custom_module({StructuredLinear: peft.tuners.lora.Linear})
    loaded = peft.PeftModel.from_pretrained(small, "adapters", config=config).eval()
    with torch.no_grad():
        logits, wanted = loaded(TOKENS).logits, teacher.eval()(TOKENS).logits
        gap, was = ((one - wanted).norm() for one in (logits, small.eval()(TOKENS).logits))
    assert torch.isfinite(logits).all()
    assert gap <= was  # small is wrapped in place: both have the adapters


@OWN_WARNINGS
def test_lora_beside_structure_is_not_merged_into_cores():
    peft = pytest.importorskip("peft")
    from benchmarks.zoo import llama

    config = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    config._register_custom_module({StructuredLinear: peft.tuners.lora.Linear})
    model = peft.get_peft_model(convert(llama(), BTT(rank=2)), config)
    with pytest.raises(RuntimeError, match=r"^[a-z_ ]+ would change the weight of a structured"):
        model.merge_and_unload()


@OWN_WARNINGS
def test_int8_of_torchao_touches_the_dense_layers_alone():
    torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = convert(GPT(width=32), BTT(rank=2), include="ffn").eval()
    expected = model(TOKENS)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert type(model.h[0].attn.c_attn.weight) is not nn.Parameter
    assert type(model.h[0].mlp.c_fc.cores[0]) is nn.Parameter
    torch.testing.assert_close(model(TOKENS), expected, atol=0.05, rtol=0.05)


@OWN_WARNINGS
def test_int8_of_torchao_that_is_told_to_take_structured_layers_fails_and_leaves_them():
    torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = convert(nn.Sequential(nn.Linear(16, 16)), BTT(rank=2))
    x = torch.randn(3, 16)
    expected, every = model(x), lambda module, name: isinstance(module, StructuredLinear)
    with pytest.raises(RuntimeError, match="parameter 'weight' would change the weight"):
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=every)
    assert torch.equal(model(x), expected)


@OWN_WARNINGS
def test_trainer_trains_saves_and_resumes(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from benchmarks.zoo import llama

    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]

    def trainer(model, steps):
        options = {
            "max_steps": steps,
            "save_steps": 2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        arguments = transformers.TrainingArguments(
            str(tmp_path), learning_rate=1e-2, logging_steps=50, **options
        )
        return transformers.Trainer(model, arguments, train_dataset=data)

    model = convert(llama(), BTT(rank=2))
    trainer(model, 2).train()
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-2")
    resumed = trainer(loaded, 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert isinstance(resumed.model.model.layers[0].mlp.up_proj, StructuredLinear)


PROGRAM = """
import sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from structlin import param_groups
from tests.stack.test_stack import TOKENS, loss_of, small

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
torch.manual_seed(0)
single, replicated, sharded = small(), small(), small()
start = {key: value.clone() for key, value in single.state_dict().items()}
replicated.load_state_dict(start), sharded.load_state_dict(start)
replicated = DistributedDataParallel(replicated)
for block in sharded.h:
    fully_shard(block)
fully_shard(sharded)
own = TOKENS[rank : rank + 1]
for model, tokens in ((single, TOKENS), (replicated, own), (sharded, own)):
    optimizer = torch.optim.SGD(param_groups(model, 0.1, optimizer="sgd"))
    for _ in range(2):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
dcp.save(get_model_state_dict(sharded), checkpoint_id=f"{folder}/dcp")
plain = small()
state = plain.state_dict()
dcp.load(state, checkpoint_id=f"{folder}/dcp")
plain.load_state_dict(state)
for other in (replicated.module, plain):
    for a, b in zip(single.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
dist.barrier()
dist.destroy_process_group()
"""


def test_ddp_and_fsdp2_train_as_one_process_does_and_dcp_loads_into_a_plain_model(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)] for rank in (0, 1)]
    running = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], errors


@OWN_WARNINGS
def test_models_of_timm_are_converted_by_role():
    timm = pytest.importorskip("timm")
    for name in (
        "vit_tiny_patch16_224",
        "beit_base_patch16_224",
        "eva02_tiny_patch14_224",
        "swinv2_tiny_window8_256",
    ):
        sizes = {"img_size": 64 if "swin" in name else 32 if "16" in name else 28}
        shape = (
            {"depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2)}
            if "swin" in name
            else {"depth": 1, "embed_dim": 48}
        )
        shape |= {} if "swin" in name else {"num_heads": 2}
        model = timm.create_model(name, **sizes, **shape, num_classes=5).eval()
        keys = set(model.state_dict())
        x = torch.randn(1, 3, sizes["img_size"], sizes["img_size"])
        convert(model, BTT(rank=1), include=["ffn", "attention"])
        assert isinstance(model.head, nn.Linear) or isinstance(model.head.fc, nn.Linear)
        y = model(x)
        torch.testing.assert_close(densify(model)(x), y, atol=1e-4, rtol=1e-3)
        assert set(model.state_dict()) == keys


@OWN_WARNINGS
def test_features_of_timm_are_extracted_from_models_that_keep_all_of_their_parameters():
    timm = pytest.importorskip("timm")
    layers, functions = timm.layers.get_notrace_modules(), timm.layers.get_notrace_functions()

    class Tracer(torch.fx.Tracer):  # that of torchvision's feature extraction, which timm calls
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, tuple(layers)) or super().is_leaf_module(m, module_qualified_name)

    sizes = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2), "img_size": 32}
    for name, options in (
        ("swinv2_cr_tiny_224", sizes | {"window_size": 4}),
        ("eva02_tiny_patch14_224", {"depth": 1, "img_size": 28}),
    ):
        model = convert(timm.create_model(name, **options).eval(), BTT(rank=1))
        graph = Tracer(autowrap_functions=tuple(functions)).trace(model)
        traced = torch.fx.GraphModule(model, graph)
        assert {*dict(traced.named_parameters())} == {*dict(model.named_parameters())}
        x = torch.randn(1, 3, options["img_size"], options["img_size"])
        torch.testing.assert_close(traced(x), model(x))
