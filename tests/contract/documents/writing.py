"""How a document is written: what YAML means to Kubernetes."""

from tests.contract.documents.case import CHECKPOINT, OPTIMIZER, as_written

WRITING = (
    as_written(
        "an exponent without quotes is a number",
        "optimizer: {learningRate: 1e-3}",
        f"{OPTIMIZER}.learningRate is 0.001; must be text",
    ),
    as_written("an exponent in quotes is text", "optimizer: {learningRate: '1e-3'}"),
    as_written("y is true", "seed: y", "spec.training.seed is true; must be a whole number"),
    as_written("on is true", "optimizer: {learningRate: on}", f"{OPTIMIZER}.learningRate is true; must be text"),
    as_written("numbers in other bases", "seed: 0x10\ncheckpoint: {everySteps: 0b11, keep: 1_0}"),
    as_written(
        "a number with a leading zero is octal",
        "checkpoint: {keep: 0177}",
        f"{CHECKPOINT}.keep is 127; must be at most 100",
    ),
    as_written("nine with a leading zero is a fraction", "seed: 09"),
    as_written("a number with a sign", "seed: +7"),
    as_written("a whole number written as a fraction", "seed: 7.0"),
    as_written("a whole number written with an exponent", "seed: 1e3"),
    as_written(
        "a date is text",
        "optimizer: {learningRate: 2026-01-01}",
        f'{OPTIMIZER}.learningRate is "2026-01-01"; must be a decimal number',
    ),
    as_written("minutes and seconds are text", "seed: 1:30", 'spec.training.seed is "1:30"; must be a whole number'),
    as_written("no value is null", "seed:"),
    as_written("a tagged text", "optimizer: {learningRate: !!str 1e-3}"),
    as_written("a key twice", "seed: 1\nseed: 2", 'line 12 is key "seed" given twice'),
    as_written("an anchor and its alias", "seed: &n 3\ncheckpoint: {keep: *n}"),
    as_written("an alias of nothing", "seed: *n", "line 11, column 11 is not YAML (found undefined alias)"),
    as_written(
        "a merge", "a: &a {keep: 2}\ncheckpoint: {<<: *a, everySteps: 5}", "spec.training.a is not a known field"
    ),
    as_written("keys that are numbers", "options: {1: a, 2.5: b, true: c}", under="compile"),
    as_written("a merge in free form", "options:\n  base: &base {a: 1}\n  more: {<<: *base, b: 2}", under="compile"),
    as_written(
        "a merge that repeats a key",
        "options:\n  base: &base {a: 1}\n  more: {<<: *base, a: 2}",
        'line 14 is key "a" given twice',
        under="compile",
    ),
    as_written("infinity", "options: {a: .inf}", "line 12 is .inf; JSON has no such number", under="compile"),
    as_written("a key of null", "options: {~: 1}", "line 12 is a list, a map or null as a key", under="compile"),
    as_written("a bracket left open", "optimizer: {learningRate: '1'", "line 12, column 1 is not YAML"),
    as_written("a tab", "\tseed: 1", "line 11, column 5 is not YAML"),
    as_written("a mapping in a value", "seed: a: b", "line 11, column 12 is not YAML"),
)

CASES = (*WRITING,)
