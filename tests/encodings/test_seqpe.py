"""SeqPE: digits, how its vectors act, its losses and their draws."""

import pytest
import torch

import mmpe
from mmpe.encodings.seqpe import leading_zeros
from mmpe.encodings.seqpe_losses import contrastive_loss, digits_of, draw_candidates, draw_windows, transfer_loss


def seqpe(depth=2, spread=True, **options):
    torch.manual_seed(1)
    enc = mmpe.create_encoding("seqpe", 24, 3, depth=depth, pe_dim=24, **options).eval()
    with torch.no_grad():
        for p in enc.parameters():
            p.add_(0.3 * torch.randn_like(p) if spread else 0)
    return enc


def attention(enc, positions, q, k, layer=0):
    return mmpe.attend(q, k, q, enc(positions).layer(layer))


def test_digits_are_spelt_with_leading_zeros():
    digits = digits_of(torch.tensor([[7, 120], [0, 999]]), 3)
    assert digits.tolist() == [[0, 0, 7, 1, 2, 0], [0, 0, 0, 9, 9, 9]]
    assert leading_zeros(digits, 3).int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_equal_digits_have_equal_embeddings_whatever_the_grid():
    enc = seqpe()
    small, large = (enc.rows(mmpe.Positions.grid(*size)).unflatten(0, size) for size in ((3, 4), (40, 40)))
    torch.testing.assert_close(large[:3, :4], small, atol=1e-5, rtol=0)
    torch.testing.assert_close(enc.encode(torch.tensor([[2.4, 2.6]])), large[2, 3][None], atol=1e-5, rtol=0)
    assert torch.equal(enc.encode(torch.tensor([[-3.0, 120.0]])), enc.encode(torch.tensor([[0.0, 99.0]])))


def test_indices_beyond_the_digits_are_refused():
    enc = seqpe(max_digits=1, grid_size=4)
    with pytest.raises(ValueError, match="max_digits=2"):
        enc(mmpe.Positions.grid(4, 11))
    assert mmpe.create_encoding("seqpe", 24, 3, axes=1).digits.limit == 10000


@pytest.mark.parametrize("mode", ["attn_mul", "attn_add", "attn_scalar"])
def test_modes_are_their_formulas(mode):
    enc, positions = seqpe(mode=mode), mmpe.Positions.grid(3, 4)
    q, k = torch.randn(2, 2, 3, 12, 8)
    pe = enc.rows(positions)
    for layer in range(2):
        both = (pe @ enc.qk_weight[layer].T + enc.qk_bias[layer]).unflatten(-1, (2, 3, 8)).permute(1, 2, 0, 3)
        pe_q, pe_k = both
        logits = {
            "attn_mul": (q * pe_q) @ (k * pe_k).transpose(-1, -2),
            "attn_add": (q + pe_q) @ (k + pe_k).transpose(-1, -2),
            "attn_scalar": q @ k.transpose(-1, -2) + pe_q @ pe_k.transpose(-1, -2),
        }[mode]
        expected = (logits * 8**-0.5).softmax(-1) @ q
        torch.testing.assert_close(attention(enc, positions, q, k, layer), expected, atol=1e-4, rtol=0)


def test_input_add_has_a_token_term_alone():
    enc, x = seqpe(mode="input_add"), torch.randn(2, 13, 24)
    positions = mmpe.Positions.grid(3, 4, prefix=1)
    added = enc.embed(x, positions) - x
    assert torch.equal(added[:, 0], torch.zeros(2, 24))
    torch.testing.assert_close(added[0, 1:], enc.rows(positions), atol=1e-5, rtol=0)
    assert torch.equal(enc.embed(x, positions, layer=1), x)
    assert enc.qk_weight is None


@pytest.mark.parametrize("mode", ["attn_mul", "attn_add", "attn_scalar"])
def test_registers_are_left_alone_and_class_tokens_have_their_vector(mode):
    enc, positions = seqpe(mode=mode, prefix=1), mmpe.Positions.grid(3, 4, prefix=3)
    q = torch.randn(1, 3, 15, 8)
    new, _ = enc(positions).layer(0).queries_keys(q, q)
    assert torch.equal(new[:, :, 1:3, :8], q[:, :, 1:3])
    changed = (new[:, :, [0, 3], -8:] - (0 if mode == "attn_scalar" else q[:, :, [0, 3]])).abs()
    assert (changed.amax(-1) > 1e-3).all()
    with pytest.raises(ValueError, match="prefix=0"):
        enc(mmpe.Positions.grid(3, 4))


def test_grouped_queries_need_shared_heads():
    positions = mmpe.Positions.grid(3, 4)
    q, k = torch.randn(1, 3, 12, 8), torch.randn(1, 1, 12, 8)
    with pytest.raises(ValueError, match="share_heads=True"):
        mmpe.attend(q, k, k, seqpe()(positions).layer(0))
    assert mmpe.attend(q, k, k, seqpe(share_heads=True)(positions).layer(0)).shape == q.shape


def test_terms_of_all_blocks_are_not_those_of_one():
    q = torch.randn(1, 3, 12, 8)
    with pytest.raises(ValueError, match="terms of 2 blocks"):
        mmpe.attend(q, q, q, seqpe()(mmpe.Positions.grid(3, 4)))


def test_random_shifts_keep_the_grid_together():
    enc, positions = seqpe(random_shift=1.0), mmpe.Positions.grid(3, 4)
    assert enc.place(positions, 2) is positions  # in evaluation
    enc.train()
    starts = torch.stack([(enc.place(positions, 2).coords - positions.coords) for _ in range(50)])
    assert torch.equal(starts, starts[:, :1].expand_as(starts))
    assert torch.equal(starts, starts.round())
    assert starts.min() >= 0
    assert (starts.amax((0, 1)) <= torch.tensor([97, 96])).all()
    assert len(starts[:, 0].unique(dim=0)) > 40
    enc.random_shift = 0.0
    assert enc.place(positions, 2) is positions


# ---------------------------------------------------------------- losses


def test_candidates_are_told_by_their_distance():
    torch.manual_seed(0)
    pivot, others, nearest = draw_candidates(200, 16, 2, 2)
    assert pivot.shape == (200, 2)
    assert others.shape == (200, 16, 2)
    assert others.min() >= 0
    assert others.max() <= 99
    assert not (others == pivot[:, None]).all(-1).any()
    distance = (others - pivot[:, None]).square().sum(-1)
    assert torch.equal(distance.gather(1, nearest[:, None])[:, 0], distance.min(1).values)
    spread = (others.amax(1) - others.amin(1)).amax(-1)
    assert 20 < int((spread < 14).sum()) < 65  # a fifth comes from a small window
    shared = (digits_of(others, 2)[:, :3] == digits_of(pivot, 2)[:, None]).sum(-1)
    assert (shared >= 2).float().mean() > 0.15  # and some look like the pivot


def test_windows_are_shifted_copies():
    inside, shifted = draw_windows(20, 9, (3, 4), 100)
    assert inside.shape == shifted.shape == (20, 9, 2)
    offset = shifted - inside
    assert torch.equal(offset, offset[:, :1].expand_as(offset))
    assert offset.min() >= 0
    assert shifted.max() <= 99
    assert all(len(window.unique(dim=0)) == 9 for window in inside)


def test_transfer_is_zero_where_similarities_agree():
    x = torch.randn(2, 5, 8)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    assert float(transfer_loss(x, x @ turn)) == pytest.approx(0, abs=1e-6)
    inside, shifted = (torch.randn(2, 5, 8, requires_grad=True) for _ in range(2))
    transfer_loss(inside, shifted).backward()
    assert inside.grad is None
    assert shifted.grad.abs().max() > 0
    transfer_loss(inside, shifted, beta=0.5).backward()
    assert inside.grad.abs().max() > 0


def test_contrast_by_heads_is_the_mean_over_heads():
    pivot, candidates, nearest = torch.randn(3, 8), torch.randn(3, 4, 8), torch.tensor([2, 0, 3])
    parts = [contrastive_loss(pivot[:, s], candidates[..., s], nearest) for s in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(contrastive_loss(pivot, candidates, nearest, heads=2), torch.stack(parts).mean())


def test_the_losses_can_be_learned():
    """On one draw, again and again: the nearest of 16 candidates is recognised, and the loss falls far below chance."""
    enc = mmpe.create_encoding("seqpe", 48, 4, mode="input_add", grid_size=4, loss_weight=1.0)
    optimiser = torch.optim.Adam(enc.parameters(), lr=3e-3)
    losses = []
    for _ in range(100):
        torch.manual_seed(3)
        loss = enc.auxiliary_loss(pivots=16, candidates=16, windows=4, cells=8)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 2.5
    assert losses[-1] < 0.5


def test_sums_and_wrappers_hand_the_losses_on():
    options = {"pe_dim": 24, "grid_size": 4}
    total = mmpe.create_encoding("ape_sincos+seqpe", 24, 3, **options)
    torch.manual_seed(0)
    expected = total.parts[1].auxiliary_loss()
    torch.manual_seed(0)
    assert torch.equal(total.auxiliary_loss(), expected)
    wrapped = mmpe.create_encoding("augmented", 24, 3, inner="seqpe", inner_options=options)
    torch.manual_seed(0)
    assert wrapped.auxiliary_loss() > 0
    assert mmpe.create_encoding("ape_sincos+rope", 24, 3).auxiliary_loss() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "mul"}, "attn_mul"),
        ({"pe_heads": 5}, "pe_heads=5"),
        ({"random_shift": 2}, "probability"),
        ({"grid_size": 101}, "max_digits"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        mmpe.create_encoding("seqpe", 24, 3, **options)


def test_tasks_add_the_losses():
    from mmpe.models import GridLabelling

    options = {"pe_dim": 24, "grid_size": 4}
    task = GridLabelling("seqpe", options, dim=24, num_heads=3, grid=(4, 4))
    assert float(task.with_own_losses(torch.tensor(1.0)).detach()) > 1.1
    assert GridLabelling("rope_axial", dim=24, num_heads=3).with_own_losses(torch.tensor(1.0)) == 1.0
