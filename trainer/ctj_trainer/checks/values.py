"""Which expressions of a function depend on the contents of tensors? Read from the code; nothing is run.

Shapes, dtypes and devices are known while a graph is made; contents are not. A value read from a tensor to the host
(`item`, `int(x)`) is as unknown as the tensor itself.
"""

import ast
from enum import IntEnum

from ctj_trainer.checks.source import Source, dotted


class Level(IntEnum):
    """What a value is, as far as the compiler is concerned."""

    KNOWN = 0
    HOST = 1
    """A Python number read from a tensor."""
    TENSOR = 2


HOST_READS = {"item", "tolist", "numpy"}
_METADATA = {"shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_meta", "requires_grad", "grad_fn", "training"}
_METADATA_CALLS = {"size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "get_device"}
_KNOWN_CALLS = {"len", "isinstance", "hasattr", "type", "range", "enumerate", "id", "callable", "getattr", "print"}
_CONVERSIONS = {"int", "float", "bool"}
_PLAIN_TYPES = {"int", "float", "bool", "str", "list[int]", "tuple[int, ...]", "torch.dtype", "torch.device"}


class Values:
    """The levels of one function's expressions."""

    def __init__(self, source: Source) -> None:
        assert isinstance(source.node, ast.FunctionDef)
        self._tensors = source.tensors
        self._levels = _arguments(source.node)
        self.masks: set[str] = set()
        for _ in range(2):  # a loop's body may use what a later line assigns
            for node in ast.walk(source.node):
                self._learn(node)

    def level(self, node: ast.AST | None) -> Level:  # noqa: PLR0911 - one line per kind of expression
        """Return what an expression is."""
        match node:
            case ast.Name(id=name):
                return self._levels.get(name, Level.KNOWN)
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                return Level.TENSOR if attribute in self._tensors else Level.KNOWN
            case ast.Attribute(attr=attribute) if attribute in _METADATA:
                return Level.KNOWN
            case ast.Call():
                return self._call(node)
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                return Level.KNOWN
            case ast.Lambda() | ast.Constant() | None:
                return Level.KNOWN
        return max((self.level(child) for child in ast.iter_child_nodes(node)), default=Level.KNOWN)

    def is_mask(self, node: ast.AST) -> bool:
        """Tell whether an expression is a boolean tensor, as far as the code shows."""
        if isinstance(node, ast.Name):
            return node.id in self.masks
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return any(self.is_mask(child) for child in ast.iter_child_nodes(node))
        is_boolean = isinstance(node, ast.Compare) or dotted(node).endswith((".bool()", "isnan()", "isfinite()"))
        return is_boolean and self.level(node) is Level.TENSOR

    def _call(self, node: ast.Call) -> Level:
        name = dotted(node.func)
        method = name.rsplit(".", 1)[-1]
        of = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            of.append(node.func.value)
        level = max((self.level(argument) for argument in of), default=Level.KNOWN)
        if name in _KNOWN_CALLS or (method in _METADATA_CALLS and isinstance(node.func, ast.Attribute)):
            return Level.KNOWN
        if level is Level.TENSOR and (method in HOST_READS or name in _CONVERSIONS):
            return Level.HOST
        return level

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value)
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                self._levels[name] = max(self._levels.get(name, Level.KNOWN), self.level(value))
            case ast.For(target=target, iter=iterated) if self.level(iterated) is Level.TENSOR:
                self._assign(target, iterated)

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its)
            return
        level = self.level(value)
        for name in (child.id for child in ast.walk(target) if isinstance(child, ast.Name)):
            self._levels[name] = max(level, self._levels.get(name, Level.KNOWN))
            if self.is_mask(value):
                self.masks.add(name)


def _arguments(function: ast.FunctionDef) -> dict[str, Level]:
    """Arguments are tensors, unless they are annotated or defaulted as something else."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    positional = [*function.args.posonlyargs, *function.args.args]
    defaults = dict(zip([a.arg for a in positional][::-1], function.args.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d}
    levels = {}
    for argument in every:
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        default = defaults.get(argument.arg)
        is_plain = annotation.replace(" | None", "") in _PLAIN_TYPES or (
            isinstance(default, ast.Constant) and default.value is not None
        )
        levels[argument.arg] = Level.KNOWN if is_plain or argument.arg == "self" else Level.TENSOR
    return levels
