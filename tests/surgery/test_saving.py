"""Edits as plain values: made again bit for bit, kept with weights of timm, transformers and PyTorch."""

import copy
import json
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn

import wellposed as wp
from own_model import OwnModel
from wellposed.models import build, describe_weights, load_weights
from wellposed.train import Recipe
from wellposed.train.edits import apply_edits
from zoo import BY_NAME, Case, each_kind, output

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def tiny(seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, **options}).eval()


def edited(model: nn.Module) -> nn.Module:
    wp.gray_tokens(model, 0.6, "svd", rescale=False)
    wp.gray_tokens(model, target_kappa=50.0, where="blocks", blocks=[1])
    wp.broadcast_context(model, "mlp.middle", scaled=True, init="identity", blocks=[0, 2])
    wp.broadcast_context(model, "attention.end")
    wp.remove_skips(model, "ffn", blocks=2)
    wp.uniform_heads(model, [1], blocks=[0])
    return randomised(model)


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model


def images(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def same(one: nn.Module, other: nn.Module, x: Tensor | None = None) -> None:
    x = images() if x is None else x
    assert wp.edits(one)
    assert wp.edits(one) == wp.edits(other)
    with torch.no_grad():
        assert torch.equal(output(one, x), output(other, x))


@each_kind
def test_edits_are_made_again_bit_for_bit(case: Case) -> None:
    model, other = case.model(), case.model(seed=5)
    wp.gray_tokens(model, 0.6, "dct", "embedding" if case.has_embedding else "blocks")
    if case.has_mlp:
        wp.broadcast_context(model, scaled=True)
    wp.remove_skips(model, case.roles[0], blocks=0)
    saved = json.loads(wp.edits(model).to_json())
    wp.apply(other, saved)
    other.load_state_dict(model.state_dict())
    same(model, other, case.input())


def test_every_setting_is_kept() -> None:
    model, other = edited(tiny()), tiny(7)
    made = wp.apply(other, wp.edits(model))
    assert made == wp.edits(model)
    other.load_state_dict(model.state_dict())
    same(model, other)


def test_a_recipe_takes_the_same_form() -> None:
    model = edited(tiny())
    other = tiny()
    apply_edits(other, Recipe(edits=wp.edits(model).to_dict()["edits"]))
    assert wp.edits(other) == wp.edits(model)


def test_a_model_of_ones_own() -> None:
    x = images()
    model, other = OwnModel().eval(), OwnModel().eval()
    wp.gray_tokens(model, example=x)
    wp.broadcast_context(model, example=x)
    wp.apply(other, wp.edits(model).to_json(), example=x)
    other.load_state_dict(model.state_dict())
    same(model, other, x)


@pytest.mark.parametrize(
    ("edits", "error", "says"),
    [
        ({"edits": []}, TypeError, "expected edits such as"),
        ("{", ValueError, "expected edits as JSON"),
        ({"edits": [{"edit": "grey"}], "modules": []}, ValueError, "no edit 'grey'"),
        ({"edits": [{"edit": "gray_tokens", "epss": 1}], "modules": []}, ValueError, "did you mean 'eps'"),
        ({"edits": [{"edit": "gray_tokens"}], "modules": ["other"]}, ValueError, "built otherwise"),
        (
            {
                "edits": [{"edit": "broadcast_context"}, {"edit": "remove_skips", "blocks": [7]}],
                "modules": [],
            },
            IndexError,
            "within 0 and 2",
        ),
        (3, TypeError, "got a int"),
        ("no/such/folder", FileNotFoundError, "there is no no/such/folder"),
    ],
)
def test_what_does_not_fit_changes_nothing(edits, error, says) -> None:
    model, before = tiny(), tiny()
    with pytest.raises(error, match=says):
        wp.apply(model, edits)
    assert not wp.edits(model)
    assert torch.equal(model(images()), before(images()))


def test_a_model_of_another_depth_is_refused() -> None:
    model = tiny()
    wp.broadcast_context(model, blocks=[0, 2])
    with pytest.raises(IndexError, match="within 0 and 1"):
        wp.apply(tiny(depth=2), wp.edits(model))


def test_a_model_with_edits_is_refused() -> None:
    model = edited(tiny())
    with pytest.raises(ValueError, match="expected a model without edits"):
        wp.apply(model, wp.edits(model))
    assert len(wp.edits(model)) == 9


def test_the_table_says_what_was_not_touched() -> None:
    model = tiny()
    made = wp.broadcast_context(model, blocks=[1])
    assert str(made).splitlines()[-1] == "2 of 3 blocks have no broadcast_context at mlp.end: 0,2"
    assert repr(wp.edits(model)) == str(made)
    assert made.untouched == {("broadcast_context", "mlp.end"): [0, 2]}
    cait = BY_NAME["timm cait"].model()
    assert "have no broadcast_context" in str(wp.broadcast_context(cait))
    assert "have no" not in str(wp.gray_tokens(tiny()))


def test_edits_show_as_a_table_in_notebooks() -> None:
    model = tiny()
    wp.broadcast_context(model, blocks=[1])
    shown = wp.edits(model)._repr_html_()
    assert "<td>blocks.1.mlp</td>" in shown
    assert "0,2</p>" in shown
    hostile = wp.Edits([wp.Edit("gray_tokens", "embedding", None, "<script>")])._repr_html_()
    assert "<script>" not in hostile
    assert wp.Edits()._repr_html_() == "<p>no edits</p>"


def test_edits_are_copied_and_pickled() -> None:
    made = wp.edits(edited(tiny()))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made
        assert other.blocks == 3


def test_one_form_in_what_training_writes(tmp_path) -> None:
    from short_runs import run

    run(tmp_path, edits=["gray_tokens eps=0.8", "broadcast_context scaled=true blocks=1"], epochs=1)
    model = build(f"local-dir:{tmp_path / 'last'}")
    kept = json.loads((tmp_path / "last" / "config.json").read_text())["wellposed"]
    saved = wp.edits(model).to_dict()
    assert {name: kept[name] for name in saved} == saved
    state = build_run(tmp_path).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def build_run(folder) -> nn.Module:
    from wellposed.train import open_run

    return open_run(folder).model("last")


class TestTimm:
    def test_a_folder_keeps_edits_and_scales(self, tmp_path) -> None:
        model = edited(tiny())
        save(model, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["architecture"] == "vit_tiny_patch16_224"  # the rest stays
        same(model, build(f"local-dir:{tmp_path}"))
        plain = tiny(4)
        load = {name: value for name, value in model.state_dict().items() if "inserted" not in name}
        plain.load_state_dict(load)
        wp.apply(plain, tmp_path)
        same(model, plain)
        assert wp.edits(build(f"local-dir:{tmp_path}", pretrained=False)) == wp.edits(model)

    def test_a_checkpoint_of_timm_by_a_registered_name(self, tmp_path) -> None:
        from timm.models import register_model

        model = edited(tiny())
        torch.save({"state_dict": model.state_dict(), "arch": "vit"}, tmp_path / "model_best.pth.tar")
        wp.save_edits(model, tmp_path)

        @register_model
        def vit_kept_for_tests(pretrained: bool = False, **options) -> nn.Module:
            made = timm.create_model("vit_tiny_patch16_224", **{**TINY, **options})
            wp.apply(made, tmp_path / "config.json")
            return made

        path = str(tmp_path / "model_best.pth.tar")
        same(model, timm.create_model("vit_kept_for_tests", checkpoint_path=path).eval())


WEIGHT_EDITS = [wp.normalise_spectrum, lambda model: wp.condition_weights(model, strength="exact")]
by_weight_edit = pytest.mark.parametrize("edit", WEIGHT_EDITS, ids=["sigma", "exact"])


@by_weight_edit
def test_what_edits_of_weights_keep_is_loaded_too(edit, tmp_path) -> None:
    model = tiny()
    edit(model)
    randomised(model)
    save(model, tmp_path / "timm")
    same(model, build(f"local-dir:{tmp_path / 'timm'}"))
    model = TestTransformers().model()
    edit(model)
    randomised(model)
    model.save_pretrained(tmp_path / "hf")
    wp.save_edits(model, tmp_path / "hf")
    other = type(model).from_pretrained(tmp_path / "hf").eval()
    wp.apply(other, tmp_path / "hf")
    assert wp.edits(other) == wp.edits(model)
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def save(model: nn.Module, folder) -> None:
    """As timm's own save_for_hf, with the arguments of the model."""
    from timm.models import save_for_hf

    save_for_hf(model, folder, model_args={k: v for k, v in TINY.items() if k != "num_classes"})
    wp.save_edits(model, folder)


class TestTransformers:
    def model(self, seed: int = 0) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
        config = ViTConfig(num_hidden_layers=3, num_attention_heads=2, num_labels=5, **sizes)
        return ViTForImageClassification(config).eval()

    @pytest.fixture
    def saved(self, tmp_path) -> tuple[nn.Module, str]:
        model = edited(self.model())
        model.save_pretrained(tmp_path)
        wp.save_edits(model, tmp_path)
        return model, str(tmp_path)

    def test_a_round_trip_by_one_call(self, saved) -> None:
        model, folder = saved
        other = type(model).from_pretrained(folder).eval()
        wp.apply(other, folder)
        same(model, other)
        same(model, build(f"hf:{folder}"))
        fresh = self.model(3)
        wp.apply(fresh, f"{folder}/config.json")
        load_weights(fresh, f"{folder}/model.safetensors")
        same(model, fresh)

    def test_weights_of_an_edited_model_in_a_plain_one(self, saved) -> None:
        """The file has the names of an older version of transformers; its scales are none of the model's."""
        with pytest.raises(ValueError, match=r"2 unexpected .*scale.* Nothing was loaded"):
            load_weights(self.model(3), f"{saved[1]}/model.safetensors")

    def test_shards(self, saved, tmp_path) -> None:
        model, _ = saved
        folder = tmp_path / "shards"
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()
        wp.save_edits(model, folder)
        other = type(model).from_pretrained(folder).eval()
        wp.apply(other, folder)
        same(model, other)

    def test_the_configuration_can_hold_them(self, tmp_path) -> None:
        model = edited(self.model())
        model.config.wellposed = wp.edits(model).to_dict()
        model.save_pretrained(tmp_path)
        other = type(model).from_pretrained(tmp_path).eval()
        wp.apply(other, tmp_path)
        same(model, other)

    def test_the_body_of_an_edited_classifier(self, saved) -> None:
        from transformers import ViTModel

        model, folder = saved
        body = ViTModel.from_pretrained(folder).eval()
        wp.apply(body, folder)
        with torch.no_grad():
            expected = model(images(), output_hidden_states=True).hidden_states[-1]
            assert torch.equal(body.layernorm(expected), body(images()).last_hidden_state)

    def test_scales_that_are_not_there(self, saved, tmp_path) -> None:
        model = saved[0]
        wp.restore(model)
        lacking = tmp_path / "lacking"
        model.save_pretrained(lacking)
        (lacking / "config.json").write_text((tmp_path / "config.json").read_text())
        with pytest.raises(ValueError, match=r"scales of CB_S .* do not fit"):
            wp.apply(model, lacking)
        assert not wp.edits(model)


class TestPlainTorch:
    @pytest.mark.parametrize("name", ["mine.pth", "mine.safetensors"])
    def test_a_file_with_its_edits_next_to_it(self, name, tmp_path) -> None:
        from safetensors.torch import save_file

        model, path = edited(tiny()), tmp_path / name
        save_file(model.state_dict(), path) if name.endswith("s") else torch.save(model.state_dict(), path)
        assert wp.save_edits(model, path) == tmp_path / "mine.json"
        other = tiny(4)
        wp.apply(other, path)
        load_weights(other, path)
        same(model, other)
        assert describe_weights(other) == f"weights from {path}"

    def test_weights_of_an_edited_model_in_a_plain_one(self, tmp_path) -> None:
        model = tiny()
        wp.gray_tokens(model)
        torch.save(model.state_dict(), tmp_path / "mine.pth")
        wp.save_edits(model, tmp_path)
        plain = tiny(4)
        with pytest.warns(
            UserWarning, match=r"saved with edits that this model does not have, wp\.gray_tokens"
        ):
            load_weights(plain, tmp_path / "mine.pth")
        assert "does not have" in describe_weights(plain)
        wp.broadcast_context(model, scaled=True)
        torch.save(model.state_dict(), tmp_path / "mine.pth")
        wp.save_edits(model, tmp_path)
        with pytest.raises(ValueError, match=r"wp\.apply\(model, .*mine.pth'\) makes them"):
            load_weights(tiny(4), tmp_path / "mine.pth")

    @pytest.mark.parametrize("name", ["mine.pth", "model_best.pth.tar"])
    def test_build_makes_the_edits_of_its_file(self, name, tmp_path) -> None:
        model = edited(tiny())
        torch.save({"state_dict": model.state_dict()}, tmp_path / name)
        wp.save_edits(model, tmp_path)
        same(model, build("vit_tiny_patch16_224", weights=tmp_path / name, **TINY))

    def test_no_edits_there(self, tmp_path) -> None:
        torch.save(tiny().state_dict(), tmp_path / "mine.pth")
        with pytest.raises(ValueError, match="there are none; wp"):
            wp.apply(tiny(), tmp_path / "mine.pth")

    def test_of_a_wrapped_model(self, tmp_path) -> None:
        model = edited(tiny())
        wp.save_edits(torch.nn.DataParallel(model), tmp_path)
        assert wp.apply(tiny(), tmp_path / "config.json") == wp.edits(model)
