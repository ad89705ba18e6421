"""Whole documents: kind, names, metadata, fields that do not exist."""

from tests.contract.documents.case import FOUR, REMOVE, Case, bad, good

WHOLE = (
    good("the smallest job", {}),
    good(
        "one stage",
        {
            "spec.ladder": [{"name": "only", "strategy": "fsdp", "nodes": 2, "gpusPerNode": 8}],
            "spec.training.globalBatchSize": 64,
        },
    ),
    good("all four stages", {"spec.ladder": FOUR}),
    bad("no spec", {"spec": REMOVE}, "spec is missing"),
    bad(
        "a spec of nothing",
        {"spec": {}},
        "spec.ladder is missing",
        "spec.recipe is missing",
        "spec.training is missing",
    ),
    bad("another kind", {"kind": "Job"}, 'kind is "Job"'),
    bad("another version", {"apiVersion": "training.ctj.dev/v1"}, 'apiVersion is "training.ctj.dev/v1"'),
    bad("no kind", {"kind": REMOVE}, "kind is missing"),
    Case(name="a list", text="[1, 2]", problems=("the document is [1, 2]",)),
    Case(name="text", text="hello", problems=('the document is "hello"',)),
    Case(name="nothing", text="# only a comment\n", problems=("the file is missing",)),
    bad(
        "too large to be stored",
        {"spec.recipe.config": {"text": "x" * 2_000_000}},
        "the document is 20",
        needs_a_write=True,
    ),
)

NAMES = (
    good("a name of 46 letters beside a stage of 6", {"metadata.name": "n" * 46}),
    bad(
        "a name of 47 letters beside a stage of 6",
        {"metadata.name": "n" * 47},
        f'metadata.name is "{"n" * 47}"; may have 46 characters beside stage "single"',
    ),
    good("digits and dashes in the name", {"metadata.name": "a-1-b2"}),
    bad(
        "a name that starts with a digit",
        {"metadata.name": "1b-llama"},
        'metadata.name is "1b-llama"; must be lower-case',
    ),
    bad("a name with a dot", {"metadata.name": "llama.1b"}, 'metadata.name is "llama.1b"; must be lower-case'),
    bad("a name in capitals", {"metadata.name": "Llama"}, 'metadata.name is "Llama"; must be lower-case'),
    bad("a name that ends with a dash", {"metadata.name": "llama-"}, 'metadata.name is "llama-"; must be lower-case'),
    bad("a name that is a number", {"metadata.name": 7}, "metadata.name is 7; must be text"),
    bad("no name", {"metadata.name": REMOVE}, "metadata.name is missing"),
    bad("no metadata", {"metadata": REMOVE}, "metadata is missing"),
    good("a generated name", {"metadata": {"generateName": "llama-"}}),
    bad("a generated name that is too long", {"metadata": {"generateName": "n" * 50}}, "metadata.name is "),
    bad("a generated name that is none", {"metadata": {"generateName": "Llama-"}}, "metadata.name is "),
    bad("a stage name with a dot", {"spec.ladder.0.name": "a.b"}, 'spec.ladder[0].name is "a.b"; must be lower-case'),
    bad(
        "a stage name that ends with a line break",
        {"spec.ladder.0.name": "a\n"},
        r'spec.ladder[0].name is "a\n"; must be lower-case',
    ),
    good("a stage name of 20 letters", {"spec.ladder.0.name": "s" * 20}),
    bad("a stage name of 21 letters", {"spec.ladder.0.name": "s" * 21}, "spec.ladder[0].name is "),
    bad(
        "an empty stage name",
        {"spec.ladder.0.name": ""},
        'spec.ladder[0].name is "";',
    ),
    bad("two stages of one name", {"spec.ladder.1.name": "single"}, 'spec.ladder is a list with name "single" 2 times'),
)

METADATA = (
    good(
        "labels and annotations",
        {
            "metadata.labels": {"kueue.x-k8s.io/queue-name": "gpus"},
            "metadata.annotations": {"team/Note": "any text: 1"},
        },
    ),
    bad("a label that is a number", {"metadata.labels": {"a": 1}}, "metadata.labels.a is 1; must be text"),
    bad("a label that is true", {"metadata.labels": {"a": True}}, "metadata.labels.a is true; must be text"),
    bad("a label with a space", {"metadata.labels": {"a": "b c"}}, 'metadata.labels.a is "b c"'),
    bad("a label of 64 letters", {"metadata.labels": {"a": "b" * 64}}, "metadata.labels.a is "),
    bad(
        "a label key with two slashes",
        {"metadata.labels": {"a/b/c": "d"}},
        'metadata.labels["a/b/c"] is not a valid key',
    ),
    bad(
        "an annotation key with a space",
        {"metadata.annotations": {"a b": "c"}},
        'metadata.annotations["a b"] is not a valid key',
    ),
    bad(
        "annotations of more than 256 KiB",
        {"metadata.annotations": {"a": "b" * 262_144}},
        "metadata.annotations is 262145 bytes",
    ),
    bad("an unknown field of metadata", {"metadata.label": {"a": "b"}}, "metadata.label is not a known field"),
    bad(
        "a resource version on a new job",
        {"metadata.resourceVersion": "7"},
        'metadata.resourceVersion is "7"',
        needs_a_write=True,
    ),
    bad("a finalizer with a space", {"metadata.finalizers": ["my own"]}, 'metadata.finalizers[0] is "my own"'),
    good(
        "what an export leaves behind",
        {"metadata.creationTimestamp": None, "metadata.uid": "7c0fce38", "metadata.generation": 3},
    ),
    bad(
        "an owner with an unknown field",
        {"metadata.ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b", "x": 1}]},
        "metadata.ownerReferences[0].x is not a known field",
    ),
)

UNKNOWN = (
    bad("an unknown field at the top", {"specs": {}}, "specs is not a known field"),
    bad("an unknown field of spec", {"spec.trainig": {}}, "spec.trainig is not a known field"),
    bad("an unknown field of training", {"spec.training.batchSize": 4}, "spec.training.batchSize is not a known field"),
    bad("an unknown field of a stage", {"spec.ladder.1.gpus": 4}, "spec.ladder[1].gpus is not a known field"),
    bad(
        "a field in other capitals",
        {"spec.training.microbatchsize": 4},
        "spec.training.microbatchsize is not a known field",
    ),
    bad(
        "an unknown field of the pod template",
        {"spec.template": {"hostNetwork": True}},
        "spec.template.hostNetwork is not a known field",
    ),
    bad("an unknown field of status", {"status": {"phases": "Running"}}, "status.phases is not a known field"),
    good("a status, which is ignored", {"status": {"phase": "Running", "step": -1}}),
    good(
        "anything in the recipe's config", {"spec.recipe.config": {"a": [1, None, {"b": "c"}], "model": {"path": None}}}
    ),
    good("anything in inductor's options", {"spec.compile": {"options": {"triton.cudagraphs": True, "x": None}}}),
    good(
        "pod fields in the template's lists",
        {"spec.template": {"env": [{"name": "A", "value": "b"}], "tolerations": [{"operator": "Exists"}]}},
    ),
)

CASES = (
    *WHOLE,
    *NAMES,
    *METADATA,
    *UNKNOWN,
)
