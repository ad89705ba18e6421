"""Static-graph readiness, step 1 and 4: branches, loops and assertions that depend on what a tensor holds.

A graph has no branches: each one breaks it, or (with fullgraph) ends the compilation. What to write instead stands in
the finding.
"""

import ast
from collections.abc import Iterator

from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.source import Source, calls, dotted, text
from ctj_trainer.checks.values import HOST_READS, Level, Values

BRANCHES = Rule(check="static-graph", name="no branch on the contents of a tensor")
LOOPS = Rule(check="static-graph", name="no Python loop over a tensor")
SHAPES = Rule(check="static-graph", name="no shape that depends on the contents of a tensor")
ASSERTIONS = Rule(check="static-graph", name="assertions are part of the graph (torch._assert)")
HOST = Rule(check="host-read", name="no number is read from a tensor inside a layer")

_DATA_SIZED = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "bincount"}


def check_control_flow(sources: list[Source]) -> list[Finding]:
    """Judge every function of a model against the five rules."""
    findings: dict[Rule, list[Finding]] = {rule: [] for rule in (BRANCHES, LOOPS, SHAPES, ASSERTIONS, HOST)}
    for source in sources:
        if not isinstance(source.node, ast.FunctionDef):
            continue
        values = Values(source)
        findings[BRANCHES] += _branches(source, values)
        findings[LOOPS] += _loops(source, values)
        findings[SHAPES] += _shapes(source, values)
        findings[ASSERTIONS] += _assertions(source, values)
        findings[HOST] += _host_reads(source, values)
    looked_at = f"{len(sources)} functions read"
    return [finding for rule, failures in findings.items() for finding in rule.judge(failures, looked_at=looked_at)]


def _branches(source: Source, values: Values) -> Iterator[Finding]:
    for node in ast.walk(source.node):
        if not isinstance(node, ast.If | ast.While | ast.IfExp) or values.level(node.test) is Level.KNOWN:
            continue
        if isinstance(node, ast.If) and _only_raises(node):
            continue  # an assertion, spelled as a branch
        kind = "while" if isinstance(node, ast.While) else "if"
        yield BRANCHES.fails(
            source.subject,
            location=source.at(node),
            evidence=f"`{kind} {text(node.test)}` is decided by a tensor's contents: the graph ends here",
            remedy="torch.while_loop" if kind == "while" else "torch.cond for one decision, torch.where per element",
            rewrite=_cond(node) if isinstance(node, ast.If | ast.IfExp) else "",
        )


def _loops(source: Source, values: Values) -> Iterator[Finding]:
    for node in ast.walk(source.node):
        if not isinstance(node, ast.For):
            continue
        over = node.iter
        by_contents = dotted(over) == "range()" and any(
            values.level(argument) is not Level.KNOWN for argument in getattr(over, "args", ())
        )
        if values.level(over) is Level.TENSOR or by_contents or _walks_rows(node, values):
            yield LOOPS.fails(
                source.subject,
                location=source.at(node),
                evidence=f"`for {text(node.target)} in {text(over)}` is unrolled for each size, or ends the graph",
                remedy="write the body for one row and map it over the tensor with torch.vmap",
                rewrite=_vmap(node),
            )


def _shapes(source: Source, values: Values) -> Iterator[Finding]:
    for name, call in calls(source.node):
        method = name.rsplit(".", 1)[-1]
        is_where = method == "where" and len(call.args) == 1 and not call.keywords
        if (method in _DATA_SIZED or is_where) and values.level(call) is Level.TENSOR:
            yield SHAPES.fails(
                source.subject,
                location=source.at(call),
                evidence=f"`{text(call)}` has as many elements as the data says",
                remedy="keep the full shape and carry a mask: torch.where(mask, value, 0)",
            )
    for node in ast.walk(source.node):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and values.is_mask(node.slice):
            yield SHAPES.fails(
                source.subject,
                location=source.at(node),
                evidence=f"`{text(node)}` selects by a mask: its size depends on the data",
                remedy="keep the full shape and carry the mask",
                rewrite=f"torch.where({text(node.slice)}, {text(node.value)}, 0)",
            )


def _assertions(source: Source, values: Values) -> Iterator[Finding]:
    for node in ast.walk(source.node):
        is_branch = isinstance(node, ast.If) and _only_raises(node)
        if not isinstance(node, ast.Assert | ast.If) or values.level(node.test) is Level.KNOWN:
            continue
        if isinstance(node, ast.If) and not is_branch:
            continue
        condition = f"~({text(node.test)})" if is_branch else text(node.test)
        message = text(node.msg) if isinstance(node, ast.Assert) and node.msg else repr(f"{text(node.test)}")
        yield ASSERTIONS.fails(
            source.subject,
            location=source.at(node),
            evidence=f"`{text(node)}` reads a tensor on the host at every call",
            remedy="put the assertion into the graph",
            rewrite=f"torch._assert({condition}, {message})",
        )


def _host_reads(source: Source, values: Values) -> Iterator[Finding]:
    for name, call in calls(source.node):
        method = name.rsplit(".", 1)[-1]
        is_conversion = name in {"int", "float", "bool"} and call.args and values.level(call.args[0]) is Level.TENSOR
        is_read = method in HOST_READS and values.level(call) is Level.HOST
        if not (is_read or is_conversion):
            continue
        yield HOST.fails(
            source.subject,
            location=source.at(call),
            evidence=f"`{text(call)}` ({method}) breaks the graph {source.count} times per step, once in each layer",
            remedy="compute the number once in the collator and pass it to the model as an argument",
        )


def _only_raises(node: ast.If) -> bool:
    return len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse


def _walks_rows(node: ast.For, values: Values) -> bool:
    """Tell whether the loop variable indexes a tensor for each of its rows: `for i in range(x.shape[0]): x[i]`."""
    if dotted(node.iter) != "range()" or not isinstance(node.target, ast.Name):
        return False
    sized = any(isinstance(child, ast.Attribute) and child.attr in {"shape", "size"} for child in ast.walk(node.iter))
    indexed = any(
        isinstance(child, ast.Subscript)
        and values.level(child.value) is Level.TENSOR
        and any(isinstance(n, ast.Name) and n.id == node.target.id for n in ast.walk(child.slice))
        for child in ast.walk(node)
    )
    return sized and indexed


def _cond(node: ast.If | ast.IfExp) -> str:
    """Write a branch of two assignments, returns or expressions as torch.cond; empty where it is more than that."""
    if isinstance(node, ast.IfExp):
        yes, no, target = node.body, node.orelse, ""
    else:
        pair = [_single_value(node.body), _single_value(node.orelse)]
        if None in pair or pair[0][0] != pair[1][0]:  # type: ignore[index]
            return ""
        (target, yes), (_, no) = pair  # type: ignore[misc]
    names = sorted({n.id for part in (yes, no) for n in ast.walk(part) if isinstance(n, ast.Name)} - {"self", "torch"})
    operands = ", ".join(names)
    call = (
        f"torch.cond({text(node.test)}, lambda {operands}: {text(yes)}, lambda {operands}: {text(no)}, ({operands},))"
    )
    return f"{target}{call}"


def _single_value(body: list[ast.stmt]) -> tuple[str, ast.expr] | None:
    match body:
        case [ast.Assign(targets=[target], value=value)]:
            return f"{text(target)} = ", value
        case [ast.Return(value=ast.expr() as value)]:
            return "return ", value
    return None


def _vmap(node: ast.For) -> str:
    row = node.target.id if isinstance(node.target, ast.Name) else "row"
    over = next((n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name) and n.id not in {"range", "len"}), "x")
    return f"torch.vmap(lambda {row}: ...)({over})  # the loop's body, for one row of {over}"
