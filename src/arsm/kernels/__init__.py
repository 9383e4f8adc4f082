"""Operators that are opaque to torch.compile, mapped by vmap, and Triton kernels on a GPU.

`order` runs the race of one variable and says who can win, `merge` sums all its pairs
as `arsm.univariate` has it. Both treat all leading dimensions alike. `pairs` swaps
several variables at once and `merge_pairs` sums their pairs. They are registered by
`torch.library.define`, since an operator made by `custom_op` imports torch._dynamo, 70
MB of it, at its first eager call.

`one_kernel` replaces a function of many small operations by one kernel, in eager mode
on a GPU. Nothing outside this package asks on which device a tensor lies, whether it is
compiled, or how large it is, to save time.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from arsm.kernels.compared import ComparedPairs as ComparedPairs

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""PyTorch for CUDA brings Triton along, except on Windows."""
FEW = 32
"""Up to this many categories, comparing all of them is faster than ordering them."""
OWN_NOISE = 512
"""From this many categories on, a compiled graph's noise on a GPU is drawn by an
operator of its own.
"""
STATE = 9
"""Numbers of a race that Triton's kernels keep."""
ONE_BLOCK = 512
"""Up to this many categories, one program holds a row."""
BUCKETS = 8192
"""Most buckets of a row that Triton's kernels sort into."""

torch.library.define(
    "arsm::order",
    "(Tensor logits, Tensor log_pi) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "arsm::merge",
    "(Tensor logits, Tensor log_pi, Tensor ahead, Tensor state, Tensor with_z, Tensor wins, "
    "Tensor rank, Tensor f) -> (Tensor, Tensor)",
    # a compiler need not copy f, which may be part of a wider tensor
    tags=torch.Tag.flexible_layout,
)

# `outer` batch dimensions precede the dimension of the queries: the queries of each mapped row are
# then contiguous
torch.library.define("arsm::pairs", "(Tensor logits, Tensor log_pi, int outer) -> (Tensor, Tensor)")
torch.library.define("arsm::merge_pairs", "(Tensor values, Tensor log_pi, int outer) -> Tensor")
torch.library.define(
    "arsm::log_dirichlet",
    "(Tensor like, ScalarType dtype) -> Tensor",
    tags=torch.Tag.nondeterministic_seeded,
)


class Order(NamedTuple):
    """The result of `order`: [..., C], if nothing else is said; empty, [..., 0], where
    this device's `merge` does without.

    Triton's kernels keep the race's state and look up the rest again; their `wins` are
    where the buckets of the order start and their `rank` the members of the order, see
    `gpu_order`.
    """

    ahead: Tensor
    """[..., 3] int64: the first three of the race, z first."""
    can_win: Tensor
    """bool."""
    state: Tensor
    """[..., STATE] float64."""
    with_z: Tensor
    """int8, who wins the pair (z, c): 0 for z, 1 for c, 2 for the first of the others."""
    wins: Tensor
    """int32, the number r_c of references that c wins against."""
    rank: Tensor
    """int32, the place of c in the order of a; C where it is not ordered."""

    @property
    def z(self) -> Tensor:
        """[...]: the winner."""
        return self.ahead[..., 0]


def order(logits: Tensor, log_pi: Tensor) -> Order | ComparedPairs:
    """Run the race and find out who wins its pairs: logits and ln pi [..., C]."""
    if logits.shape[-1] <= FEW and not on_gpu(logits):
        from arsm.kernels import compared  # plain PyTorch, which a compiler can fuse

        return compared.order(logits, log_pi)
    operator = _order if _plain(logits) else torch.ops.arsm.order
    return Order(*operator(logits, log_pi))


def merge(logits: Tensor, log_pi: Tensor, found: Order | ComparedPairs, f: Tensor) -> Tensor:
    """The ARSM gradient from what `order` found and f at every category, [..., C], in
    f's dtype or float64.
    """
    if not isinstance(found, Order):
        from arsm.kernels import compared

        return compared.merge(log_pi, found, f)
    ahead, _, state, with_z, wins, rank = found
    if f.shape[-1] > FEW and f.stride(-1) != 1:
        # outside the operator, where a compiler moves the categories last while it makes f
        f = f.contiguous()
    operator = _merge if _plain(f) else torch.ops.arsm.merge
    sums, mean = operator(logits, log_pi, ahead, state, with_z, wins, rank, f)
    if mean.shape[-1] == 0:  # for few categories on a GPU the kernel has subtracted it
        return sums
    # a compiled graph keeps the sums for its backward, which are smaller, and subtracts the mean
    # there, together with what comes next
    return sums - mean if torch.compiler.is_compiling() else sums.sub_(mean)


def pairs(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """z, then z^{c<->j} of all pairs as `swap.pair_table` has them, and the first that
    equals each: [*B, K, C] -> [1 + C(C-1)/2, *B, K] and [1 + C(C-1)/2, *B], int64.
    """
    if not _has_pairs(logits):
        from arsm.kernels import eager

        return eager.pairs(logits, log_pi)
    operator = _pairs if _plain(logits) else torch.ops.arsm.pairs
    return operator(logits, log_pi, 0)


def merge_pairs(values: Tensor, log_pi: Tensor) -> Tensor:
    """The ARSM gradient [*B, K, C] from f at what `pairs` found, [1 + C(C-1)/2, *B], in
    its dtype, and ln pi.
    """
    if not _has_pairs(log_pi):
        from arsm.kernels import eager

        return eager.merge_pairs(values, log_pi)
    operator = _merge_pairs if _plain(values) else torch.ops.arsm.merge_pairs
    return operator(values, log_pi, 0)


def log_dirichlet(
    like: Tensor,
    dtype: torch.dtype,
    generator: torch.Generator | None,
    otherwise: Callable[[], Tensor],
) -> Tensor:
    """ln pi in a dtype with pi ~ Dir(1_C), [..., C]; by the given function where no
    kernel is faster.

    A kernel draws two or four exponentials from one random number of 128 bits; compiled
    code draws one, and an operator inside compiled code takes no generator.
    """
    if eager_on_gpu(like):
        return _log_dirichlet(like, dtype, generator)
    if on_gpu(like) and generator is None and like.shape[-1] >= OWN_NOISE:
        return torch.ops.arsm.log_dirichlet(like, dtype)
    return otherwise()


P = ParamSpec("P")
T = TypeVar("T")


def one_kernel(
    module: str, categories: Callable[P, int]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Replace a function by the Triton kernel of the same name, in eager mode on a GPU.

    There launching the function's many small operations takes longer than running them,
    while a compiler would fuse them itself. The kernel is in a module of this package
    and holds all categories of a row at once; `categories` counts them. The arguments
    start with a tensor.
    """

    def replaced(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if eager_on_gpu(args[0]) and categories(*args, **kwargs) <= ONE_BLOCK:  # pyright: ignore[reportArgumentType]
                return getattr(_in(module), function.__name__)(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return replaced


def _has_pairs(logits: Tensor) -> bool:
    """Whether one program holds a row's pairs: logits [*B, K, C]."""
    variables, categories = logits.shape[-2:]
    # four bits for a category, and 121 queries per row that are compared with each other
    return on_gpu(logits) and categories <= 16 and variables <= 64


def on_gpu(x: Tensor) -> bool:
    """Whether the operators are Triton's kernels for x."""
    return x.is_cuda and HAS_TRITON


def eager_on_gpu(x: Tensor) -> bool:
    """Whether the operators are Triton's kernels for x, and x is neither traced nor mapped."""
    return on_gpu(x) and _plain(x)


def _few_on_gpu(f: Tensor) -> bool:
    return f.shape[-1] <= FEW and on_gpu(f)


def _plain(x: Tensor) -> bool:
    """Whether nobody traces or maps x: then an operator may be called without PyTorch's
    dispatch, which takes longer than a small kernel."""
    tracked = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return type(x) is Tensor and not tracked


def buckets_of(categories: int) -> int:
    """Buckets per row that Triton's kernels sort into: a power of 2, for few elements each."""
    return max(16, min(BUCKETS, 1 << (categories // 16).bit_length()))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _order(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, ...]:
    batch = logits.shape[:-1]

    def nothing(dtype: torch.dtype) -> Tensor:
        """An operator always returns six tensors: this stands for what a backend does not keep."""
        return logits.new_empty((*batch, 0), dtype=dtype)

    if not on_gpu(logits):
        found = _in("eager").order(_rows(logits), _rows(log_pi))
        ahead, can_win, with_z, wins, rank = (x.view(*batch, x.shape[-1]) for x in found)
        return ahead, can_win, nothing(torch.float64), with_z, wins, rank
    logits = logits.contiguous()
    log_pi = log_pi.contiguous()
    if logits.shape[-1] <= FEW:
        ahead, can_win = _in("gpu_few").order(logits, log_pi)
        return ahead, can_win, *(nothing(dtype) for dtype in _ORDERED)
    ahead, can_win, state, wins, rank = _in("gpu_order").order(logits, log_pi)
    return ahead, can_win, state, nothing(torch.int8), wins, rank


def _merge(
    logits: Tensor,
    log_pi: Tensor,
    ahead: Tensor,
    state: Tensor,
    with_z: Tensor,
    wins: Tensor,
    rank: Tensor,
    f: Tensor,
) -> tuple[Tensor, Tensor]:
    if _few_on_gpu(f):
        gradient = _in("gpu_few").merge(logits.contiguous(), log_pi.contiguous(), f)
        # the kernel has subtracted the mean
        return gradient, f.new_empty((*f.shape[:-1], 0), dtype=torch.float64)
    if on_gpu(f):
        own = (x.contiguous() for x in (logits, log_pi, ahead, state, wins, rank))
        # rows of f may lie apart, as part of a wider tensor
        f = f if f.stride(-1) == 1 else f.contiguous()
        return _in("gpu_merge").merge(*own, f)
    rows = (_rows(x) for x in (log_pi, ahead, with_z, wins, rank, f.contiguous()))
    sums, mean = _in("eager").merge(*rows)
    return sums.view(f.shape), mean.view(*f.shape[:-1], 1)


def _pairs(logits: Tensor, log_pi: Tensor, outer: int) -> tuple[Tensor, Tensor]:
    if on_gpu(logits):
        return _in("gpu_pairs").pairs(logits.contiguous(), log_pi.contiguous(), outer)
    table, same_as = _in("eager").pairs(logits, log_pi)
    return table.movedim(0, outer).contiguous(), same_as.movedim(0, outer).contiguous()


def _merge_pairs(values: Tensor, log_pi: Tensor, outer: int) -> Tensor:
    if on_gpu(values):
        return _in("gpu_pairs").merge_pairs(values.contiguous(), log_pi.contiguous(), outer)
    return _in("eager").merge_pairs(values.movedim(outer, 0), log_pi)


def _log_dirichlet(
    like: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    return _in("gpu_noise").log_dirichlet(like.new_empty(like.shape, dtype=dtype), generator)


@functools.cache
def _in(module: str) -> Any:
    """The functions of a module of this package.

    It is imported when first needed, because it may import Triton, or modules that
    import this one.
    """
    imported = importlib.import_module(f"arsm.kernels.{module}")
    functions = inspect.getmembers(imported, inspect.isfunction)
    return SimpleNamespace(**{name: _on_its_gpu(function) for name, function in functions})


def _on_its_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the GPU of the first tensor current while the function runs: Triton launches
    kernels on the current GPU.
    """

    @functools.wraps(function)
    def run(x: Tensor, *args: Any) -> Any:
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *args)
        with torch.cuda.device(x.device):
            return function(x, *args)

    return run


_ORDERED = (torch.float64, torch.int8, torch.int32, torch.int32)
"""Types of state, with_z, wins and rank."""


torch.library.impl("arsm::order", ("cpu", "cuda"), _order)
torch.library.impl("arsm::merge", ("cpu", "cuda"), _merge)
torch.library.impl("arsm::pairs", ("cpu", "cuda"), _pairs)
torch.library.impl("arsm::merge_pairs", ("cpu", "cuda"), _merge_pairs)
torch.library.impl("arsm::log_dirichlet", "cuda", _log_dirichlet)


@torch.library.register_fake("arsm::order")
def _(logits: Tensor, log_pi: Tensor) -> tuple[Tensor, ...]:
    *batch, categories = logits.shape
    # the same cases as in `_order`
    if not on_gpu(logits):
        sizes = (0, categories, categories, categories)
    elif categories <= FEW:
        sizes = (0, 0, 0, 0)
    else:
        sizes = (STATE, 0, buckets_of(categories) + 1, categories)
    ahead = logits.new_empty((*batch, 3), dtype=torch.int64)
    can_win = logits.new_empty((*batch, categories), dtype=torch.bool)
    found = [ahead, can_win]
    for size, dtype in zip(sizes, _ORDERED, strict=True):
        found.append(logits.new_empty((*batch, size), dtype=dtype))
    return tuple(found)


@torch.library.register_fake("arsm::merge")
def _(
    logits: Tensor,
    log_pi: Tensor,
    ahead: Tensor,
    state: Tensor,
    with_z: Tensor,
    wins: Tensor,
    rank: Tensor,
    f: Tensor,
) -> tuple[Tensor, Tensor]:
    means = 0 if _few_on_gpu(f) else 1
    mean = f.new_empty((*f.shape[:-1], means), dtype=torch.float64)
    return f.new_empty(f.shape), mean


@torch.library.register_fake("arsm::pairs")
def _(logits: Tensor, log_pi: Tensor, outer: int) -> tuple[Tensor, Tensor]:
    *batch, variables, categories = logits.shape
    shape = (*batch[:outer], 1 + categories * (categories - 1) // 2, *batch[outer:])
    points = logits.new_empty((*shape, variables), dtype=torch.int64)
    return points, logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake("arsm::merge_pairs")
def _(values: Tensor, log_pi: Tensor, outer: int) -> Tensor:
    return values.new_empty(log_pi.shape)


@torch.library.register_fake("arsm::log_dirichlet")
def _(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(like.shape, dtype=dtype)


def _map(op: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The operator over one more leading dimension; an operator with outer dimensions
    has one more of them.
    """

    def mapped(info: Any, in_dims: tuple[int | None, ...], *xs: Any) -> tuple[Any, Any]:
        given = []
        for x, dim in zip(xs, in_dims, strict=True):
            if isinstance(x, int):  # the number of outer dimensions
                given.append(x + 1)
            elif dim is None:  # the same for all of the mapped dimension
                given.append(x.expand(info.batch_size, *x.shape))
            else:
                given.append(x.movedim(dim, 0))
        out = op(*given)
        # every result has the mapped dimension first
        return out, 0 if isinstance(out, Tensor) else tuple(0 for _ in out)

    return mapped


torch.library.register_vmap("arsm::order", _map(torch.ops.arsm.order))
torch.library.register_vmap("arsm::merge", _map(torch.ops.arsm.merge))
torch.library.register_vmap("arsm::pairs", _map(torch.ops.arsm.pairs))
torch.library.register_vmap("arsm::merge_pairs", _map(torch.ops.arsm.merge_pairs))


def _map_noise(
    info: Any, in_dims: tuple[int | None, ...], like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, int | None]:
    if info.randomness == "error":
        raise RuntimeError(
            'Noise is drawn inside torch.vmap; call it with randomness="different" or "same".'
        )
    # only the shape of `like` counts, so that any one of its rows will do
    place = in_dims[0]
    one = like if place is None else like.select(place, 0)
    if info.randomness == "same":
        return torch.ops.arsm.log_dirichlet(one, dtype), None
    every = one.expand(info.batch_size, *one.shape)
    return torch.ops.arsm.log_dirichlet(every, dtype), 0


torch.library.register_vmap("arsm::log_dirichlet", _map_noise)
