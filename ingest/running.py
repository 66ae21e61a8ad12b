"""A checkpoint as ``transformers`` itself builds and runs it, and the attention modules within.

Modules are found by the values of their output projections and by how tensors flow, never by
name: what a file calls a tensor is what a comparison is to put to the test.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingest.dummy_input import dummy_input
from ingest.plan import LayerPlan, Plan
from stats.errors import CheckpointError, HeadatlasError

EXACT_IN = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Dtypes that hold every value of a storage type; float32 holds those of any other."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class NotComparableError(Exception):
    """A layer whose operators the running model does not show; the message says why."""


@dataclass(frozen=True, slots=True)
class NormCall:
    """A norm that took part in a forward pass, what it read and what it gave."""

    module: nn.Module
    read: Tensor
    given: Tensor


@dataclass(frozen=True, slots=True)
class RunningAttention:
    """One attention module as it was called, its output projection by path within it, and norms around.

    ``replaced`` are the arguments that hold the tokens. ``feeding`` is the norm in front of
    attention, which stands in the module itself where ``feeding_within`` names it, and ``branch``
    the norm that reads what the projection gives.
    """

    module: nn.Module
    projection: str
    call: Call
    replaced: tuple[str, ...]
    feeding_within: str | None
    feeding: nn.Module | None
    branch: nn.Module | None


def load_transformers() -> Any:
    """The library, which is needed for nothing else.

    Raises:
        HeadatlasError: it is not installed.
    """
    try:
        return import_module("transformers")
    except ImportError as error:
        raise HeadatlasError(
            "the transformers library is needed to run a checkpoint and cannot be imported",
            expected="the extra named conformance",
            found=str(error),
            remedy="install Headatlas with it: pip install '.[conformance]'",
        ) from error


def exact_dtype(plan: Plan) -> torch.dtype:
    """The narrowest dtype that holds every value the plan reads."""
    wanted = [EXACT_IN.get(header.dtype, torch.float32) for header in plan.tensors]
    dtype = wanted[0]
    for other in wanted[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


class RunningModel:
    """The model of a checkpoint, loaded by ``transformers`` and run once on a short dummy input."""

    def __init__(self, source: str, plan: Plan) -> None:
        """Load the whole model in the narrowest dtype that is exact.

        Args:
            source: the checkpoint as the user named it.
            plan: what Headatlas reads of it.

        Raises:
            HeadatlasError: transformers is absent, or cannot load the checkpoint.
        """
        library = load_transformers()
        with _quiet(library):
            try:
                self._model, info = _load(library, source, plan)
            except Exception as error:
                raise CheckpointError(
                    "transformers cannot load the checkpoint",
                    where=source,
                    expected="a model of a class it has",
                    found=f"{type(error).__name__}: {first_line(error)}",
                    remedy="name a whole directory or GGUF file of a family that transformers runs",
                ) from error
        self._model.eval()
        self._names = dict(self._model.named_modules())
        self._missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        self._by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, module in self._names.items():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2:
                self._by_shape[tuple(sorted(weight.shape))].append(name)
        self._found: dict[str, tuple[str, str]] = {}
        self._calls: dict[nn.Module, Call] = {}
        self._written: dict[nn.Module, Tensor] = {}
        self._norms: list[NormCall] = []
        self._failures: list[str] = []

    @property
    def model_class(self) -> str:
        """The class of ``transformers`` that runs the checkpoint."""
        return type(self._model).__name__

    def find(self, plan: Plan, layers: Sequence[LayerPlan]) -> None:
        """Find the attention modules of layers and run them once, whole model first, then its parts."""
        taken: set[str] = set()
        for layer in layers:
            name = layer.tensors["output"]
            path = self._projection(plan.checkpoint.read(name), taken if name not in self._found else set())
            if path is not None:
                taken.add(path)
                self._found[name] = path, self._owner(path, layer.sizes.d_source)
        wanted = {owner for _, owner in self._found.values()}
        hooks = [self._names[name].register_forward_pre_hook(self._record_call, with_kwargs=True) for name in wanted]
        projections = {path for path, _ in self._found.values()}
        hooks += [self._names[path].register_forward_hook(self._record_written) for path in projections]
        leaves = (module for module in self._names.values() if not list(module.children()))
        norms = [module for module in leaves if "norm" in type(module).__name__.lower()]
        hooks += [module.register_forward_hook(self._record_norm) for module in norms]
        with torch.no_grad():
            self._run_parts(wanted)
        for hook in hooks:
            hook.remove()

    def attention(self, layer: LayerPlan) -> RunningAttention:
        """The attention module of a layer.

        Raises:
            NotComparableError: it cannot be found, was not loaded, or never ran.
        """
        name = layer.tensors["output"]
        if name not in self._found:
            raise NotComparableError(f"no module of {self.model_class} holds the values of {name}")
        path, owner = self._found[name]
        module = self._names[owner]
        missing = [key for key in self._missing if key.startswith(f"{owner}.")]
        if missing:
            raise NotComparableError(f"transformers found no values that fit {missing[0]}")
        if module not in self._calls:
            raise NotComparableError("; ".join(self._failures) or f"{self.model_class} never called {owner}")
        call = self._calls[module]
        bound = inspect.signature(module.forward).bind(*call[0], **call[1]).arguments
        replaced = _token_arguments(bound, layer)
        read, written = bound[replaced[0]], self._written.get(self._names[path])
        folded = layer.source if layer.two_spaces else layer.feeding
        inside = {} if folded is None else {part: name for name, part in module.named_modules()}
        within = next((norm.module for norm in self._norms if norm.module in inside and _same(norm.read, read)), None)
        feeding = within or next((norm.module for norm in self._norms if _same(norm.given, read)), None)
        branch = (norm.module for norm in self._norms if written is not None and _same(norm.read, written))
        return RunningAttention(
            module,
            path.removeprefix(f"{owner}."),
            call,
            replaced,
            None if within is None else inside[within],
            feeding,
            next(branch, None),
        )

    def _projection(self, values: Tensor, taken: set[str]) -> str | None:
        """Path of the first module not taken whose weight has these values, either way round."""
        for path in self._by_shape.get(tuple(sorted(values.shape)), ()):
            weight = self._names[path].weight
            assert isinstance(weight, Tensor)
            if path not in taken and (_equal(weight, values) or _equal(weight.mT, values)):
                return path
        return None

    def _owner(self, path: str, width: int) -> str:
        """The smallest module around a projection that has another matrix for tokens of this width."""
        own, owner = self._names[path].weight, path
        while owner:
            owner = owner.rpartition(".")[0]
            matrices = (weight for weight in self._names[owner].parameters() if weight.ndim == 2)
            if any(weight is not own and width in weight.shape for weight in matrices):
                break
        return owner

    def _run_parts(self, wanted: set[str]) -> None:
        """Run the model, then whatever parts of it hold modules that were not called."""
        for name, part in self._names.items():
            missed = [owner for owner in wanted if self._names[owner] not in self._calls]
            inside = any(f"{owner}.".startswith(f"{name}." if name else "") for owner in missed)
            if inside and hasattr(part, "main_input_name"):
                try:
                    part(**dummy_input(part))
                except Exception as error:
                    self._failures.append(f"{type(part).__name__} cannot be run: {first_line(error)}")

    def _record_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.setdefault(module, (args, kwargs))

    def _record_written(self, module: nn.Module, _args: tuple[Any, ...], result: Tensor) -> None:
        self._written.setdefault(module, result)

    def _record_norm(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            self._norms.append(NormCall(module, args[0], result))


def _load(library: Any, source: str, plan: Plan) -> tuple[nn.Module, dict[str, Any]]:
    """Build the class the configuration names, else the one that goes with its ``model_type``."""
    place, options = _location(source, plan)
    config = library.AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    named = [getattr(library, str(name), None) for name in config.architectures or ()]
    classes: list[Any] = [
        item for item in named if isinstance(item, type) and issubclass(item, library.PreTrainedModel)
    ]
    loaded: tuple[nn.Module, dict[str, Any]] = [*classes, library.AutoModel][0].from_pretrained(
        place,
        config=config,
        dtype=exact_dtype(plan),
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    return loaded


def _location(source: str, plan: Plan) -> tuple[str, dict[str, Any]]:
    """Where ``from_pretrained`` finds the checkpoint, and what else it needs to be told."""
    path, options = Path(source).expanduser(), dict[str, Any]()
    if plan.checkpoint.format == "gguf":
        options["gguf_file"] = next(iter(plan.checkpoint.files))
    if not path.exists():
        return source.partition("@")[0], options | {"revision": plan.checkpoint.revision}
    return str(path if path.is_dir() else path.parent), options | {"local_files_only": True}


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Keep the library from writing bars and advice while it loads."""
    logging = library.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)


def first_line(error: Exception) -> str:
    """The beginning of what another library says, or the kind of its error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _equal(weight: Tensor, values: Tensor) -> bool:
    """Whether two matrices hold the same numbers, the first row first."""
    if weight.shape != values.shape:
        return False
    dtype = torch.promote_types(weight.dtype, values.dtype)
    return all(torch.equal(weight[rows].to(dtype), values[rows].to(dtype)) for rows in (slice(1), slice(1, None)))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, or hold the same numbers."""
    return one is other or torch.equal(one, other)


def _token_arguments(arguments: dict[str, Any], layer: LayerPlan) -> tuple[str, ...]:
    """Names of the arguments that hold the tokens whose values a head passes on.

    Cross-attention takes them beside the tokens that attend, as any argument that is neither a mask
    nor a position; otherwise they are the first argument and whatever is the same tensor.
    """
    width = layer.sizes.d_source
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first, *others = [name for name, value in tensors.items() if value.is_floating_point()] or [""]
    names = [first, *(name for name in others if tensors[name] is tensors[first])]
    if layer.two_spaces or "cross" in layer.stack:
        aside = ("mask", "position")
        names = [name for name in others if name not in names and not any(word in name for word in aside)]
    names = [name for name in names if name and tensors[name].shape[-1] == width]
    if not names:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
        raise NotComparableError(f"no argument of the module holds tokens of width {width}: {shapes}")
    return tuple(names)
