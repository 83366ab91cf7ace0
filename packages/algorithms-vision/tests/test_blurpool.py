"""BlurPool against filters written out, and against torch's own layers where blurring changes nothing."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional as F

from hocket import NoEffectWarning
from hocket_vision.blurpool import BlurConv2d, BlurMaxPool2d, blur, blurpool
from hocket_vision.models import small_resnet

KERNEL = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16
MODES = ["zeros", "reflect", "replicate", "circular"]


def slow_blur(x: torch.Tensor, mode: str = "zeros", stride: tuple[int, int] = (1, 1)) -> torch.Tensor:
    """One output pixel at a time."""
    x = F.pad(x, (1, 1, 1, 1), "constant" if mode == "zeros" else mode)
    rows = []
    for i in range(0, x.shape[-2] - 2, stride[0]):
        row = [
            (x[..., i : i + 3, j : j + 3] * KERNEL.to(x)).sum((-2, -1)) for j in range(0, x.shape[-1] - 2, stride[1])
        ]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def seeded_model(layer: nn.Module) -> nn.Sequential:
    """Surgery replaces the modules of a model, not the model itself."""
    return nn.Sequential(layer)


def test_impulse_response_is_the_binomial_filter():
    impulse = torch.zeros(1, 2, 5, 5)
    impulse[:, :, 2, 2] = 16
    conv = BlurConv2d(2, 2, 1, stride=1, bias=False)
    response = blur(impulse, conv.blur_kernel)
    assert response[0, 1, 1:4, 1:4].tolist() == [[1, 2, 1], [2, 4, 2], [1, 2, 1]]
    assert response[0, 0].sum() == 16


def test_blurred_maximum_of_a_ramp():
    pooled = BlurMaxPool2d(2)(torch.arange(16.0).reshape(1, 1, 4, 4))
    assert pooled[0, 0].tolist() == [[3.75, 4.5], [6.75, 7.5]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1), (1, 3)])
def test_blur_equals_the_filter_written_out(mode, stride):
    x = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(blur(x, KERNEL.reshape(1, 1, 3, 3), stride, mode), slow_blur(x, mode, stride))


CONVS = [
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=3, stride=2, padding=1, padding_mode="reflect"),
    dict(kernel_size=3, stride=2, padding=1, padding_mode="circular", bias=False),
    dict(kernel_size=(3, 5), stride=(2, 1), padding=(1, 2), padding_mode="replicate"),
    dict(kernel_size=3, stride=(1, 3), padding="valid"),
    dict(kernel_size=3, stride=2, padding=2, dilation=2, groups=4),
    dict(kernel_size=1, stride=2, bias=False),
]


@pytest.mark.parametrize("blur_first", [True, False])
@pytest.mark.parametrize("settings", CONVS, ids=str)
def test_convolution_keeps_all_its_settings(settings, blur_first):
    torch.manual_seed(1)
    conv = nn.Conv2d(16, 8, **settings)
    x = torch.randn(2, 16, 9, 12)
    plain = conv(x)
    model, changed = blurpool(seeded_model(conv), blur_first=blur_first)
    assert len(changed) == 1
    out = model(x)
    assert out.shape == plain.shape

    # The same by hand, from functions alone.
    mode = settings.get("padding_mode", "zeros")
    padding = settings.get("padding", 0)
    padding = 0 if padding == "valid" else padding
    stride = settings["stride"] if isinstance(settings["stride"], tuple) else (settings["stride"],) * 2

    def convolve(x: torch.Tensor, stride: tuple[int, int]) -> torch.Tensor:
        vertical, horizontal = padding if isinstance(padding, tuple) else (padding, padding)
        x = F.pad(x, (horizontal, horizontal, vertical, vertical), "constant" if mode == "zeros" else mode)
        return F.conv2d(x, conv.weight, conv.bias, stride, 0, settings.get("dilation", 1), settings.get("groups", 1))

    expected = convolve(slow_blur(x, mode), stride) if blur_first else slow_blur(convolve(x, (1, 1)), mode, stride)
    torch.testing.assert_close(out, expected)


@st.composite
def pools(draw):
    kernel = draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 2))
    settings = dict(
        kernel_size=kernel,
        stride=draw(st.integers(1, 4)),
        padding=draw(st.integers(0, kernel // 2)) if dilation == 1 else 0,
        dilation=dilation,
        ceil_mode=draw(st.booleans()),
    )
    smallest = dilation * (kernel - 1) + 1
    return settings, draw(st.integers(smallest, 12)), draw(st.integers(smallest, 12))


@given(pools())
def test_pooling_keeps_its_shape_whatever_its_settings(case):
    settings, height, width = case
    x = torch.randn(1, 2, height, width)
    plain = F.max_pool2d(x, **settings)
    out = BlurMaxPool2d(**settings)(x)
    assert out.shape == plain.shape and out.isfinite().all()
    # Constant images stay constant away from the zero padding, so no maximum was taken over nothing.
    ones = BlurMaxPool2d(**settings)(torch.ones(1, 1, height, width))
    corners = {round((a * b).item() * 16) for a, b in itertools.product(torch.tensor([2.0, 3.0, 4.0]) / 4, repeat=2)}
    assert {round(value * 16) for value in ones.flatten().tolist()} <= corners


@given(pools())
def test_pooling_subsamples_the_maxima_that_torch_takes(case):
    """With a filter of one pixel blurring does nothing: what remains is torch's pooling, partial windows included."""
    settings, height, width = case
    x = torch.randn(1, 2, height, width)
    pool = BlurMaxPool2d(**settings)
    pool.blur_kernel = torch.zeros(1, 1, 3, 3)
    pool.blur_kernel[..., 1, 1] = 1
    assert pool(x).equal(F.max_pool2d(x, **settings))


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 1), (2, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_small_maps_work(size, mode):
    conv = nn.Conv2d(16, 4, 1, stride=2, padding_mode=mode)
    x = torch.randn(2, 16, *size)
    plain = conv(x)
    for blur_first in (True, False):
        assert blurpool(seeded_model(copy.deepcopy(conv)), blur_first=blur_first)[0](x).shape == plain.shape


def test_unbatched_maps_and_other_dtypes_work():
    model = blurpool(nn.Sequential(nn.Conv2d(16, 4, 3, 2, 1), nn.MaxPool2d(2)))[0]
    x = torch.randn(3, 16, 8, 8)
    batched = model(x)
    torch.testing.assert_close(model(x[1]), batched[1])
    torch.testing.assert_close(model.double()(x.double()).float(), batched)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.float()(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), batched, atol=0.05, rtol=0.05)


def test_parameters_are_the_same_objects_and_keys_stay():
    torch.manual_seed(0)
    plain = small_resnet()
    before = plain.state_dict()
    parameters = dict(plain.named_parameters())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, changed = blurpool(plain)
    assert len(changed) == 4 and sum(isinstance(m, BlurConv2d) for m in model.modules()) == 4
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert list(model.state_dict()) == list(before)
    model.load_state_dict(before)
    small_resnet().load_state_dict(model.state_dict())
    weight = model.get_submodule("stage2.0.conv1").weight
    old = weight.detach().clone()
    F.cross_entropy(model(torch.rand(4, 1, 8, 8)), torch.arange(4)).backward()
    optimizer.step()  # the optimizer made before surgery trains the model after it
    assert not weight.equal(old)


def test_tied_weights_stay_tied_and_a_shared_module_is_replaced_once():
    shared = nn.Conv2d(16, 16, 3, 2, 1)
    twin = nn.Conv2d(16, 16, 3, 2, 1)
    twin.weight = shared.weight
    model, _ = blurpool(nn.ModuleList([shared, nn.Sequential(shared), twin]))
    assert model[0] is model[1][0] and isinstance(model[0], BlurConv2d)
    assert model[2].weight is model[0].weight is shared.weight


def test_hooks_mode_and_flags_survive():
    model = nn.Sequential(nn.Conv2d(16, 4, 3, 2, 1)).eval()
    model[0].weight.requires_grad_(False)
    seen = []
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    blurpool(model)
    model(torch.zeros(1, 16, 4, 4))
    assert seen == [BlurConv2d] and not model[0].training and not model[0].weight.requires_grad
    handle.remove()
    model(torch.zeros(1, 16, 4, 4))
    assert len(seen) == 1


def test_first_layer_is_left_alone_and_settings_choose():
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, 2), nn.Conv2d(16, 16, 3))

    def types(**settings) -> list[type]:
        return [type(module) for module in blurpool(make(), **settings)[0]]

    assert types() == [nn.Conv2d, BlurMaxPool2d, BlurConv2d, nn.Conv2d]
    assert types(min_channels=1) == [BlurConv2d, BlurMaxPool2d, BlurConv2d, nn.Conv2d]
    assert types(replace_convs=False) == [nn.Conv2d, BlurMaxPool2d, nn.Conv2d, nn.Conv2d]
    assert types(replace_maxpools=False) == [nn.Conv2d, nn.MaxPool2d, BlurConv2d, nn.Conv2d]
    with pytest.raises(ValueError, match="both False"):
        blurpool(make(), replace_convs=False, replace_maxpools=False)


def test_surgery_twice_changes_nothing_more():
    model, _ = blurpool(small_resnet())
    modules = list(model.modules())
    with pytest.warns(NoEffectWarning, match=r"already applied .* 4 modules.* is BlurConv2d\(.*blur_first=True"):
        _, changed = blurpool(model, blur_first=False)
    assert changed == [] and all(a is b for a, b in zip(model.modules(), modules, strict=True))


def test_nothing_to_replace_warns():
    with pytest.warns(NoEffectWarning, match="found nothing to change in Sequential: no Conv2d of at least 16"):
        assert blurpool(nn.Sequential(nn.Linear(2, 2), nn.MaxPool2d(3, stride=1)))[1] == []


def test_what_cannot_be_replaced_is_named():
    class Padded(nn.Conv2d):
        def forward(self, input):
            return super().forward(input) * 2

    model = nn.ModuleDict({"a": Padded(16, 16, 3, 2), "b": nn.MaxPool2d(2, return_indices=True), "c": nn.MaxPool2d(2)})
    with pytest.warns(UserWarning, match=r"a \(Padded.*b \(return_indices=True\)"):
        assert len(blurpool(model)[1]) == 1
    assert type(model["a"]) is Padded and type(model["c"]) is BlurMaxPool2d
    with pytest.raises(ValueError, match="return_indices"):
        BlurMaxPool2d(2, return_indices=True)


def test_filter_follows_the_module_and_stays_out_of_checkpoints():
    conv = BlurConv2d(16, 4, 3, 2, blur_first=False)
    assert set(conv.state_dict()) == {"weight", "bias"}
    assert conv.to(torch.float64).blur_kernel.dtype == torch.float64
    again = pickle.loads(pickle.dumps(conv))
    x = torch.randn(1, 16, 5, 5, dtype=torch.float64)
    assert again(x).equal(conv(x)) and copy.deepcopy(conv)(x).equal(conv(x))
    assert "blur_first=False, blur_stride=(2, 2)" in repr(conv)


def test_modules_made_on_the_meta_device_are_completed_by_reset_parameters():
    with torch.device("meta"):
        model = nn.Sequential(BlurConv2d(16, 4, 3, 2), BlurMaxPool2d(2))
    model.to_empty(device="cpu")
    for module in model:
        module.blur_kernel.fill_(torch.nan)
        module.reset_parameters()
        torch.testing.assert_close(module.blur_kernel[0, 0], KERNEL)


def test_shifts_change_the_output_less_than_without():
    """What the method is for: arXiv 1904.11486, section 4.3, with the shift-sensitivity of one pooling layer."""
    x = torch.randn(8, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    shifted = x.roll(1, -1)
    inner = (..., slice(2, -2), slice(2, -2))

    def change(pool: nn.Module) -> torch.Tensor:
        a, b = pool(x)[inner], pool(shifted)[inner]
        return (a - b).pow(2).mean() / a.var()

    assert change(BlurMaxPool2d(2)) < 0.5 * change(nn.MaxPool2d(2))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("layer", [nn.Conv2d(16, 8, 1, 2), nn.Conv2d(16, 8, 3, 2, 1), nn.MaxPool2d(3, 2, 1)], ids=str)
def test_shortcuts_change_neither_numbers_nor_gradients_nor_memory_format(layer, layout):
    """Against the definition: every pixel blurred, and then the plain layer or the plain subsampling."""
    x = torch.randn(2, 16, 9, 12, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)
    blurred = blurpool(seeded_model(copy.deepcopy(layer)))[0]
    ours, definition = x.clone().requires_grad_(), x.clone().requires_grad_()
    if isinstance(layer, nn.Conv2d):
        expected = layer(slow_blur(definition))
    else:
        expected = slow_blur(F.max_pool2d(definition, 3, 1, 1))[..., ::2, ::2]
    out = blurred(ours)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    assert out.is_contiguous(memory_format=layout)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, definition.grad, atol=1e-5, rtol=1e-5)
    if isinstance(layer, nn.Conv2d):
        torch.testing.assert_close(blurred[0].weight.grad, layer.weight.grad, atol=1e-4, rtol=1e-5)
        layer.zero_grad()


def test_gradient_is_that_of_the_linear_map():
    conv = BlurConv2d(2, 3, 3, 2, 1).double()
    assert torch.autograd.gradcheck(conv, torch.randn(1, 2, 4, 4, dtype=torch.double, requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # torch's, of that Python only
        compiled = torch.compile(BlurConv2d(16, 4, 3, 2), backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1, 16, 5, 5)).shape == (1, 4, 2, 2)
