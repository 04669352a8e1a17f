"""Edits of weights: layers read f(W), the parameter stays, and all of it lasts, folds and is undone."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrize

import wellposed as wp
from wellposed.errors import NoMeaningError
from wellposed.surgery.weights import weight_edits
from zoo import BY_NAME, Case, each_kind, families, output

WITH_PROJECTIONS = [
    "timm vit",
    "timm eva",
    "timm beit",
    "timm swin",
    "timm cait",
    "timm pvt_v2",
    "hf vit",
    "hf beit",
    "hf swin",
    "torchvision vit",
    "torch encoder pre-norm",
]
EDITS = {
    "lambda": lambda model: wp.condition_weights(model, strength=3.0),
    "exact": lambda model: wp.condition_weights(model, strength="exact"),
    "sigma": lambda model: wp.normalise_spectrum(model),
}
each_edit = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())


def vit(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    return BY_NAME["timm vit"].model(dtype=torch.float64, **kwargs)


def by_hand(weight: torch.Tensor, which: str, strength: float) -> torch.Tensor:
    """A packed (3 D, D) weight with lambda I added to some of its three parts."""
    out = weight.detach().clone()
    width = weight.shape[1]
    for number, letter in enumerate("qkv"):
        if letter in which:
            for i in range(width):
                out[number * width + i, i] += strength
    return out


@pytest.mark.parametrize("which", ["qkv", "q", "kv", "v"])
def test_lambda_on_the_diagonal_of_each_projection(which: str) -> None:
    model, plain = vit(), vit()
    wp.condition_weights(model, which, 2.5)
    with torch.no_grad():
        for block in plain.blocks:
            block.attn.qkv.weight.copy_(by_hand(block.attn.qkv.weight, which, 2.5))
    x = BY_NAME["timm vit"].input(dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)


def test_rectangular_projections_get_a_rectangular_identity() -> None:
    case = BY_NAME["timm pvt_v2"]
    model = case.model(dtype=torch.float64)
    layer = model.stages[0].blocks[0].attn.kv
    before = layer.weight.detach().clone()
    wp.condition_weights(model, "k", 2.0, blocks=0)
    k, v = (layer.weight - before).chunk(2)
    assert torch.equal(k.round(decimals=12), 2 * torch.eye(*k.shape, dtype=k.dtype))
    assert not v.any()


def test_exact_has_kappa_of_at_most_two() -> None:
    model = vit()
    plain = [block.attn.qkv.weight.detach().clone() for block in model.blocks]
    wp.condition_weights(model, strength="exact")
    for block, before in zip(model.blocks, plain, strict=True):
        for part, old in zip(block.attn.qkv.weight.chunk(3), before.chunk(3), strict=True):
            U, S, Vh = torch.linalg.svd(old)
            torch.testing.assert_close(part, old + S[0] * U @ Vh, rtol=1e-10, atol=1e-10)
            assert torch.linalg.cond(part) <= 2 + 1e-9


def test_sigma_is_the_largest_singular_value_and_follows_the_weight() -> None:
    model = vit()
    wp.normalise_spectrum(model, "ffn")
    layer = model.blocks[0].mlp.fc1
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1, abs=1e-12)
    with torch.no_grad():
        noise = torch.randn(layer._parameters["weight"].shape, generator=torch.Generator().manual_seed(1))
        layer._parameters["weight"].add_(noise.double(), alpha=0.3)
    model.train()
    for _ in range(200):
        layer.weight  # noqa: B018  (each look of a training pass is a step of the power iteration)
    model.eval()
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1, abs=1e-6)


def test_the_gradient_of_a_normalised_weight() -> None:
    model = vit()
    wp.normalise_spectrum(model, "ffn")
    layer = model.blocks[0].mlp.fc1
    weight = layer._parameters["weight"]

    def by_hand(w: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return gamma * w / torch.linalg.matrix_norm(w, 2)

    upstream = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gamma = layer.weight_edit.gamma
    got = torch.autograd.grad((layer.weight * upstream).sum(), (weight, gamma))
    expected = torch.autograd.grad((by_hand(weight, gamma) * upstream).sum(), (weight, gamma))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@each_edit
@families(*WITH_PROJECTIONS)
def test_every_way_of_packing(case: Case, edit) -> None:
    """Changed, in the model's own dtype, with the same parameters; undone bit for bit."""
    model, x = case.model(), case.input()
    before, names = output(model, x).detach(), [name for name, _ in model.named_parameters()]
    made = edit(model)
    assert set(made) == set(wp.edits(model))
    after = output(model, x)
    assert after.isfinite().all()
    assert (after - before).abs().max() > 1e-3
    assert set(names) <= {name for name, _ in model.named_parameters()}
    assert wp.restore(model) == made
    assert torch.equal(output(model, x), before)
    assert [name for name, _ in model.named_parameters()] == names


@families("timm vit", "timm beit", "hf vit", "torchvision vit", "torch encoder pre-norm")
def test_an_identity_of_sigma_computes_the_same(case: Case) -> None:
    model, x = case.model(dtype=torch.float64), case.input(dtype=torch.float64)
    before = output(model, x)
    wp.normalise_spectrum(model, init="identity")
    torch.testing.assert_close(output(model, x), before, rtol=1e-9, atol=1e-9)


@each_edit
def test_folded_is_equal_and_plain(edit) -> None:
    model, x = vit(), BY_NAME["timm vit"].input(dtype=torch.float64)
    keys = set(model.state_dict())
    wp.broadcast_context(model)
    made = edit(model)
    expected = model(x)
    assert set(wp.fold(model)) == set(made)
    assert torch.equal(model(x), expected)
    assert {each.kind for each in wp.edits(model)} == {"broadcast_context"}
    assert set(model.state_dict()) == keys
    assert type(model.blocks[0].attn.qkv) is nn.Linear


def test_what_mixes_tokens_does_not_fold() -> None:
    model = vit()
    wp.broadcast_context(model)
    with pytest.raises(
        NoMeaningError, match=r"got broadcast_context: what mixes tokens .* cannot be written"
    ):
        wp.fold(model)


@each_edit
def test_copies_pickles_and_states(edit) -> None:
    model, x = vit(), BY_NAME["timm vit"].input(dtype=torch.float64)
    edit(model)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        assert wp.edits(twin) == wp.edits(model)
        assert wp.restore(twin)
        assert type(twin.blocks[0].attn.qkv) is nn.Linear
    twin = vit()
    edit(twin)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


def test_lambda_adds_nothing_to_the_state() -> None:
    model = vit()
    keys = list(model.state_dict())
    wp.condition_weights(model)
    assert list(model.state_dict()) == keys


@pytest.mark.slow
@each_edit
def test_compiled_and_exported(edit) -> None:
    model, x = vit().train(), BY_NAME["timm vit"].input(dtype=torch.float64)
    edit(model)
    eager, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-9, atol=1e-9)
    compiled(x).square().sum().backward()
    eager(x).square().sum().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-7)
    model.eval()
    program = torch.export.export(model, (x,), strict=True).module()
    torch.testing.assert_close(program(x), model(x), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@each_edit
@families("timm vit", "hf vit", "torchvision vit")
def test_runs_in_onnxruntime(case: Case, edit, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = case.model(), case.input()
    edit(model)
    expected = output(model, x).detach()
    program = Tensors(model)
    torch.onnx.export(program, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-3, atol=1e-4)


class Tensors(nn.Module):
    """A model of any library as a map from tensor to tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return output(self.model, x)


@each_edit
def test_moves_with_the_model_and_runs_in_half_precision(edit) -> None:
    model, x = BY_NAME["timm vit"].model(), BY_NAME["timm vit"].input()
    edit(model)
    exact = output(model, x)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert {each.dtype for each in (*half.parameters(), *half.buffers())} == {torch.bfloat16}
    assert output(half, x.bfloat16()).isfinite().all()
    back = copy.deepcopy(model).double().float()
    assert torch.equal(output(back, x), exact)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = output(model, x).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@each_edit
def test_in_distributed_data_parallel(edit, tmp_path) -> None:
    """The same gradients, of what is learned too, and buffers that it may broadcast."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = vit().train(), BY_NAME["timm vit"].input(dtype=torch.float64)
        edit(model)
        alone = copy.deepcopy(model)
        replicated = nn.parallel.DistributedDataParallel(model)
        for each in (replicated, alone):
            for _ in range(2):
                each.zero_grad()
                each(x).square().sum().backward()
        for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
        assert all(map(torch.equal, model.buffers(), alone.buffers()))
    finally:
        torch.distributed.destroy_process_group()


def test_projections_as_distilbert_names_them() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=32, vocab_size=20)
    made = wp.condition_weights(transformers.DistilBertModel(config), strength=1.0)
    assert {edit.module.rpartition(".")[2] for edit in made} == {"q_lin", "k_lin", "v_lin"}


def test_both_edits_of_a_layer_and_others_around_it() -> None:
    """An operation before the layer, which marks its class, and an edit of its weight, in either order."""
    x = BY_NAME["timm vit"].input(dtype=torch.float64)
    outputs = []
    for first in (True, False):
        model = vit()
        before = model(x)
        if first:
            wp.broadcast_context(model, "mlp.middle")
        wp.normalise_spectrum(model, "ffn")
        if not first:
            wp.broadcast_context(model, "mlp.middle")
        outputs.append(model(x))
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), outputs[-1])
        assert len(wp.restore(model)) == 6
        assert torch.equal(model(x), before)
    assert torch.equal(*outputs)


@each_edit
def test_saved_and_made_again(edit, tmp_path) -> None:
    model, x = vit(), BY_NAME["timm vit"].input(dtype=torch.float64)
    edit(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    wp.save_edits(model, tmp_path / "mine.pth")
    other = vit()
    plain = set(other.state_dict())
    wp.apply(other, tmp_path / "mine.pth")
    other.load_state_dict(
        {name: value for name, value in model.state_dict().items() if name in plain}, strict=False
    )
    assert torch.equal(other(x), model(x))
    assert wp.edits(other) == wp.edits(model)


def test_one_edit_of_a_weight_at_a_time() -> None:
    model = vit()
    wp.condition_weights(model)
    before = wp.edits(model)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv already has ConditionedWeight.*wp\.fold"):
        wp.normalise_spectrum(model)
    assert wp.edits(model) == before


def test_a_parametrized_weight_is_refused() -> None:
    model = vit()
    parametrize.register_parametrization(model.blocks[1].attn.qkv, "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"plain parameter weight in blocks\.1\.attn\.qkv"):
        wp.condition_weights(model)
    assert not wp.edits(model)


def test_no_attention_and_wrong_words() -> None:
    mixer = BY_NAME["timm resmlp"].model()
    with pytest.raises(NoMeaningError, match="conditioning the weights of attention has no meaning"):
        wp.condition_weights(mixer)
    for wrong in ("", "x", "qq"):
        with pytest.raises(ValueError, match=r"some of q, k and v, such as 'qkv'"):
            wp.condition_weights(vit(), wrong)
    for strength in (0, -1.0, float("inf"), "precise"):
        with pytest.raises(ValueError, match="strength must be a number above 0"):
            wp.condition_weights(vit(), strength=strength)
    with pytest.raises(ValueError, match="which must be one of all, attention, ffn"):
        wp.normalise_spectrum(vit(), "mlp")


def test_training_moves_the_parameter_and_not_what_is_added() -> None:
    model, x = vit().train(), BY_NAME["timm vit"].input(dtype=torch.float64)
    wp.condition_weights(model, strength=4.0)
    layer = model.blocks[0].attn.qkv
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    added = layer.weight - layer._parameters["weight"]
    torch.testing.assert_close(added, 4.0 * torch.eye(32, dtype=torch.float64).repeat(3, 1))


def test_edits_are_where_they_are_said_to_be() -> None:
    model = vit()
    made = wp.condition_weights(model, "v", 2, blocks=1)
    ((edit),) = made
    assert (edit.kind, edit.where, edit.block, edit.module) == (
        "condition_weights",
        "v",
        1,
        "blocks.1.attn.qkv",
    )
    assert dict(edit.settings) == {"strength": 2}
    assert not weight_edits(model.blocks[0].attn.qkv)


# Initialisations


def of_head(weight: torch.Tensor, head: int, heads: int) -> torch.Tensor:
    return weight.chunk(heads)[head]


def noisy_identity(generator: torch.Generator, alpha: float, beta: float, width: int) -> torch.Tensor:
    noise = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return alpha * noise / width**0.5 + beta * torch.eye(width, dtype=torch.float64)


def of_rank(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """The best approximation of a rank, term by term."""
    U, S, Vh = torch.linalg.svd(matrix)
    return sum(S[i] * torch.outer(U[:, i], Vh[i]) for i in range(rank))


@pytest.mark.parametrize(("scheme", "alpha", "beta"), [("mimetic", 0.7, 0.7), ("skipless", 2.0, 0.6)])
def test_queries_and_keys_are_the_papers(scheme: str, alpha: float, beta: float) -> None:
    """W_Q W_K^T of each head is alpha Z + beta I to its rank, with Z the draws of the seed in turn."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=3).double()
    wp.initialise(model, scheme, seed=5)
    attention = model.blocks[0].attn
    q, k, v = attention.qkv.weight.chunk(3)
    generator = torch.Generator().manual_seed(5)
    for head in range(3):
        wanted = of_rank(noisy_identity(generator, alpha, beta, 48), 16)
        core = of_head(q, head, 3).mT @ of_head(k, head, 3)
        torch.testing.assert_close(core, wanted, rtol=1e-9, atol=1e-9)
    if scheme == "mimetic":  # W_V W_O = alpha Z - beta I, over all heads
        wanted = noisy_identity(generator, 0.4, -0.4, 48)
        torch.testing.assert_close(v.mT @ attention.proj.weight.mT, wanted, rtol=1e-9, atol=1e-9)
    else:  # c U and c V^T of the singular vectors of a Gaussian matrix
        U, _, Vh = torch.linalg.svd(torch.randn(48, 48, generator=generator, dtype=torch.float64))
        torch.testing.assert_close(v.mT, 3 * U, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(attention.proj.weight.mT, 3 * Vh, rtol=1e-9, atol=1e-9)
    assert not attention.qkv.bias.any()
    assert not attention.proj.bias.any()


def test_the_papers_constants_can_be_given() -> None:
    """Those of a ViT-S: with one head nothing is cut off, and W_Q W_K^T is alpha Z + beta I itself."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=1).double()
    wp.initialise(model, "skipless", seed=5, alpha=1.8, beta=1.0, c=2.0)
    q, k, v = model.blocks[0].attn.qkv.weight.chunk(3)
    wanted = noisy_identity(torch.Generator().manual_seed(5), 1.8, 1.0, 48)
    torch.testing.assert_close(q.mT @ k, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(v @ v.mT, 4 * torch.eye(48, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_skipless_products_have_equal_singular_values() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1).double()
    drawn = wp.initialise(model, "skipless", seed=0)
    assert drawn == [f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    block = model.blocks[0]
    product = block.attn.qkv.weight.chunk(3)[2].mT @ block.attn.proj.weight.mT
    torch.testing.assert_close(
        torch.linalg.svdvals(product), torch.full((192,), 9.0, dtype=torch.float64), rtol=1e-10, atol=0
    )
    for layer in (block.mlp.fc1, block.mlp.fc2):
        assert torch.linalg.cond(layer.weight).item() == pytest.approx(1, abs=1e-10)
        x = torch.randn(4096, layer.in_features, dtype=torch.float64)
        assert (x @ layer.weight.mT).square().mean().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("scheme", ["skipless", "mimetic", "torch", "timm", "xavier"])
def test_the_seed_decides(scheme: str) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = vit()
        wp.initialise(model, scheme, seed=seed)
        return model.state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_without_a_seed_torchs_generator_decides() -> None:
    def drawn() -> torch.Tensor:
        wp.initialise(model, "mimetic")
        return model.blocks[0].attn.qkv.weight.detach().clone()

    model = vit()
    torch.manual_seed(3)
    first, second, after = drawn(), drawn(), torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn(), first)
    assert torch.equal(drawn(), second)
    assert torch.equal(torch.rand(3), after)
    assert not torch.equal(first, second)


REFUSED = {  # of the families, by scheme
    "mimetic": {"timm resmlp", "timm convmixer"},
    "skipless": {"timm resmlp", "timm convmixer"},
    "xavier": {"timm convmixer"},
}


@pytest.mark.parametrize("scheme", REFUSED)
@each_kind
def test_initialised_or_refused(case: Case, scheme: str) -> None:
    model, x = case.model(), case.input()
    before = output(model, x)
    if case.name in REFUSED[scheme]:
        with pytest.raises((NoMeaningError, ValueError), match=r"has no meaning for|expected square"):
            wp.initialise(model, scheme, seed=0)
        assert torch.equal(output(model, x), before)
    else:
        assert wp.initialise(model, scheme, seed=0)
        assert output(model, x).isfinite().all()
        assert not torch.equal(output(model, x), before)


def test_one_block_that_cannot_leaves_all_as_they_were() -> None:
    model = vit()
    model.blocks[1].attn.proj = nn.Linear(32, 32 * 2).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NoMeaningError, match=r"must have the tokens' channels, .*\(64, 32\)"):
        wp.initialise(model, "skipless", seed=0, blocks=[0, 1])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_biases_beside_the_layer_become_zero_too() -> None:
    model = BY_NAME["timm beit"].model()
    attention = model.blocks[0].attn
    nn.init.ones_(attention.q_bias)
    wp.initialise(model, "mimetic", seed=0)
    assert not attention.q_bias.any()


@pytest.mark.parametrize("scheme", ["torch", "timm", "xavier"])
def test_the_laws_of_linear_layers(scheme: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    wp.initialise(model, scheme, seed=0)
    layer = model.blocks[0].mlp.fc1  # 768 x 192
    bound = {"torch": 192**-0.5, "xavier": (6 / (768 + 192)) ** 0.5, "timm": 2.0}[scheme]
    deviation = 0.02 if scheme == "timm" else bound / 3**0.5
    assert layer.weight.abs().max().item() <= bound
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.01)
    assert bool(layer.bias.any()) == (scheme == "torch")


def test_an_edited_model_is_not_drawn_again() -> None:
    model = vit()
    wp.condition_weights(model)
    with pytest.raises(ValueError, match=r"expected plain weights.*wp\.restore"):
        wp.initialise(model, "mimetic")


def test_constants_of_another_scheme_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'mimetic' takes alpha, beta, output_alpha, output_beta, got c"):
        wp.initialise(vit(), "mimetic", c=3)
    with pytest.raises(ValueError, match="scheme must be one of skipless"):
        wp.initialise(vit(), "kaiming")
