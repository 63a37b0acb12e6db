"""Launches of Triton kernels that cost the host little: what a launch looks up is looked up once for its like.

Triton binds arguments by name, turns them into text and looks for a compiled kernel each time. Small batches and
training forward wait for that. Here the second launch of a kernel for arguments of the same kinds goes straight to the
compiled kernel that Triton took for the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# Releases whose compiled kernels are called as below. With others every launch is Triton's own.
KNOWN = ("3.6.",)

Known = dict[tuple[Any, ...], tuple[Any, ...]]

_launchers: dict[int, Any] = {}  # each holds its kernel, so that no id comes twice


def cdiv(length: int, size: int) -> int:
    """How many pieces of `size` cover `length`. Triton's function of this name takes the time of a launch."""
    return -(-length // size)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def launcher(kernel: Any) -> Any:
    """`launcher(kernel)[grid](*arguments, CONSTANT=..., num_warps=...)` is `kernel[grid](...)`, and returns nothing.

    Arguments of the kernel come by position, constants and options by name, and all constants follow the arguments in
    the kernel's signature; anything else raises ValueError.
    """
    # by identity: Triton's hash of a kernel is one of its source
    found = _launchers.get(id(kernel))
    if found is None:
        compiled = isinstance(kernel, triton.runtime.JITFunction) and triton.__version__.startswith(KNOWN)
        found = _launchers[id(kernel)] = Launcher(kernel) if compiled else kernel
    return found


def bind(kernel: Any, *held: Any, **named: Any) -> Callable[..., None]:
    """For launches that share their last arguments, constants and options: cheaper still.

    `bind(kernel, *held, CONSTANT=...)(grid, *arguments)` is `launcher(kernel)[grid](*arguments, *held, CONSTANT=...)`.
    """
    found = launcher(kernel)
    if isinstance(found, Launcher):
        return found.bind(held, named)
    return lambda grid, *arguments: found[grid](*arguments, *held, **named)


class Launcher:
    """The compiled kernels of one Triton kernel, by the kinds of their arguments."""

    def __init__(self, kernel: Any) -> None:
        from triton._C.libtriton import native_specialize_impl

        names = [parameter.name for parameter in kernel.params]
        self._arguments = sum(not parameter.is_constexpr for parameter in kernel.params)
        if any(parameter.is_constexpr for parameter in kernel.params[: self._arguments]):
            raise ValueError(f"launcher: in {kernel.__name__} constants must follow the arguments, got {names}")
        self._kernel, self._constants = kernel, names[self._arguments :]
        self._kind: Callable[..., tuple[str, str | None]] = native_specialize_impl
        self._known: Known = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._named, grid)

    def bind(self, held: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., None]:
        """`launch(grid, *arguments)` with `held` as the last arguments, and `named`."""
        known: Known = {}
        # an address as a number spares Triton a look-up for each
        addresses = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in held)
        return lambda grid, *arguments: self._launch(known, (), grid, arguments, held, addresses, named)

    def _named(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        self._launch(self._known, tuple(named.items()), grid, arguments, (), (), named)

    def _launch(
        self, known: Known, told: tuple[Any, ...], grid: tuple[int, ...],
        arguments: tuple[Any, ...], held: tuple[Any, ...], addresses: tuple[Any, ...], named: dict[str, Any],
    ) -> None:  # fmt: skip
        """One launch; `told` is what `known` must tell apart besides the device and the kinds of `arguments`.

        `addresses` are those of `held`, which come after `arguments`.
        """
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            self._kernel[grid](*arguments, *held, **named)  # somebody watches launches: Triton tells him of each
            return
        device = driver.active.get_current_device()
        backend, kind = self._kernel.device_caches[device][3], self._kind
        key = (device, *told, *[kind(backend, each, False, True, True) for each in arguments])
        found = known.get(key)
        if found is None:
            known[key] = self._first(grid, (*arguments, *held), named)
            return
        run, function, metadata, constants = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *addresses, *constants)

    def _first(self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if len(arguments) != self._arguments:
            raise ValueError(
                f"launcher: {self._kernel.__name__} takes {self._arguments} arguments by position, got {len(arguments)}"
            )
        missing = [name for name in self._constants if name not in named]
        if missing:
            raise ValueError(f"launcher: {self._kernel.__name__} takes {', '.join(missing)} by name, too")
        constants = tuple(named[name] for name in self._constants)
        compiled = self._kernel[grid](*arguments, **named)
        return compiled.run, compiled.function, compiled.packed_metadata, constants
