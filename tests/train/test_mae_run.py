"""Masked autoencoder as part of a training run: compiled, in bf16, monitored, on digits, exported."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor

from mae_models import FAMILIES, TINY, all_edits, build, inputs
from wellposed.linalg import condition_number
from wellposed.probes import Monitor
from wellposed.train.mae import (
    FixedMask,
    MaskedAutoencoder,
    encoder_state,
    mask_noise,
    mask_of,
)


def test_captured_in_one_graph_and_once():
    mae = build("dynamic size", all_edits).train()
    images, noise = inputs(mae, dtype=torch.float32)
    expected = mae(images, noise)
    expected.loss.backward()
    gradient = mae.encoder.pos_embed.grad.clone()
    mae.zero_grad()
    torch._dynamo.reset()
    mae.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        out = mae(images, noise)
        out.loss.backward()
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(mae.encoder.pos_embed.grad, gradient, rtol=1e-3, atol=1e-6)
        assert torch.equal(out.mask, expected.mask)
        other = mae(*inputs(mae, seed=3, dtype=torch.float32))
    assert not torch.equal(other.mask, out.mask)


def test_autocast_keeps_the_loss_in_float32():
    mae = build("dynamic size", all_edits)
    images, noise = inputs(mae, dtype=torch.float32)
    exact = mae(images, noise)
    with torch.autocast("cpu", torch.bfloat16):
        out = mae(images, noise)
    out.loss.backward()
    assert out.loss.dtype == out.prediction.dtype == torch.float32
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=0.05)
    assert out.loss.item() != exact.loss.item()
    assert mae.encoder.pos_embed.grad.isfinite().all()


def test_no_weight_decay_for_tokens_and_positions():
    mae = build("registers")
    assert mae.no_weight_decay() >= {"encoder.pos_embed", "encoder.reg_token", "decoder.mask_token"}
    without, decayed = param_groups_weight_decay(mae, 0.05, no_weight_decay_list=mae.no_weight_decay())
    assert without["weight_decay"] == 0
    for parameter in (mae.encoder.pos_embed, mae.encoder.cls_token, mae.decoder.mask_token):
        assert any(parameter is other for other in without["params"])
    assert any(mae.decoder.embed.weight is other for other in decayed["params"])


def test_monitor_sees_the_visible_tokens_of_the_encoder():
    mae = build()
    images, noise = inputs(mae, 3, dtype=torch.float32)
    numbers = Monitor(FixedMask(mae, noise), images, blocks=slice(0, 2)).measure()
    measured = {key.split("/")[1] for key in numbers if key.count("/") == 2 and not key.endswith("/worst")}
    assert measured == {"0", "1"}
    seen: list[Tensor] = []
    handle = mae.encoder.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        mae.eval()(images, noise)
    handle.remove()
    assert seen[0].shape == (3, 1 + 6, 32)
    expected = condition_number(seen[0].double()).kappa.median().item()
    assert numbers["kappa/0/input"] == pytest.approx(expected, rel=1e-3)


def test_pretraining_on_digits_learns():
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1
    train, test = images[:1536], images[1536:]
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=48, depth=1, num_heads=3
    )
    mae = MaskedAutoencoder(model, mask_ratio=0.5, decoder_width=64, decoder_depth=1, norm_pixels=False)
    test_noise = mask_noise(0, 0, len(test), mae.tokens, split="test")

    def test_loss() -> float:
        with torch.no_grad():
            return mae(test, test_noise).loss.item()

    before = test_loss()
    optimizer = torch.optim.AdamW(mae.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=250, pct_start=0.15)
    for update in range(250):
        batch = train[update % 16 * 96 :][:96]
        loss = mae(batch, mask_noise(0, update, 96, mae.tokens)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    after = test_loss()
    assert after < before / 4
    # Better than the mean image, which is what is learned without a look at the visible patches.
    hidden = mask_of(test_noise, mae.visible).hidden
    mean_image = (mae.targets(test) - mae.targets(train).mean(0)).square().mean(-1)[hidden].mean()
    assert after < 0.85 * mean_image


# For people


def test_the_encoder_is_a_plain_timm_model():
    mae = build("registers")
    state = encoder_state(mae)
    name, own = FAMILIES["registers"]
    fresh = timm.create_model(name, **{**TINY, **own})
    fresh.load_state_dict(state)
    images, _ = inputs(mae, dtype=torch.float32)
    assert torch.equal(fresh.eval()(images), mae.encoder.eval()(images))
    gathered = encoder_state(mae.state_dict())
    assert gathered.keys() == state.keys()
    assert all(torch.equal(gathered[key], state[key]) for key in state)
    assert all(value.is_contiguous() and not value.requires_grad for value in state.values())
