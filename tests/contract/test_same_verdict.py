"""`ctj validate` and the real API server (strict) judge alike: every document of one table, and chance ones."""

import json
import random
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.cluster.control_plane import ControlPlane
from tests.contract.documents import CASES, Case, rules
from tests.contract.mutations import mutated

from ctj_api.validate import admit, read_job_documents, validate_document

CHANCE_DOCUMENTS = 300
# The API server words these itself, and runs no rule while there are any.
FROM_THE_SCHEMA = ("Unsupported value", "Required value", "Duplicate value", "should ")


class JobApi:
    """The few requests these tests make: strict, as `kubectl apply` is by default."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        config = json.loads(plane.kubeconfig.read_text())
        self._token = config["users"][0]["user"]["token"]
        self._trust = ssl.create_default_context(cafile=config["clusters"][0]["cluster"]["certificate-authority"])
        self._url = f"{plane.url}/apis/training.ctj.dev/v1alpha1/namespaces/{namespace}/compiledtrainingjobs"

    def send(self, method: str, path: str, text: str, *, dry: bool = True) -> tuple[int, dict[str, Any]]:
        """Send a document as it is written; return the HTTP status and the answer."""
        request = urllib.request.Request(
            f"{self._url}{path}?fieldValidation=Strict{'&dryRun=All' if dry else ''}",
            data=text.encode(),
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/yaml"},
        )
        try:
            with urllib.request.urlopen(request, context=self._trust) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, json.load(refusal)

    def create(self, text: str, *, dry: bool = True) -> tuple[int, dict[str, Any]]:
        return self.send("POST", "", text, dry=dry)


@pytest.fixture(scope="module")
def jobs(crd_installed: ControlPlane) -> JobApi:
    return JobApi(crd_installed, "default")  # nearly all of it is a dry run; the rest is removed again


@pytest.fixture
def stored(jobs: JobApi, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Return what the case says is stored, status included, as the API server holds it."""
    case: Case = request.getfixturevalue("case")
    code, document = jobs.create(case.old, dry=False)
    assert code == 201, document
    if case.status:
        document["status"] = case.status
        code, document = jobs.send("PUT", "/job/status", json.dumps(document), dry=False)
        assert code == 200, document
    yield document
    jobs.send("DELETE", "/job", "{}", dry=False)


@pytest.mark.parametrize("case", [case for case in CASES if not case.old], ids=lambda case: case.name)
def test_new_job_is_taken_or_refused_alike(case: Case, jobs: JobApi) -> None:
    code, answer = jobs.create(case.text, dry=not case.needs_a_write)

    assert (code == 201) == case.is_good, answer
    assert (not validate_document(case.text)) == case.is_good


@pytest.mark.parametrize("case", [case for case in CASES if case.old], ids=lambda case: case.name)
def test_update_is_taken_or_refused_alike(case: Case, jobs: JobApi, stored: dict[str, Any]) -> None:
    document = yaml.safe_load(case.text)
    document["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]

    code, answer = jobs.send("PUT", "/job", json.dumps(document))

    assert (code == 200) == case.is_good, answer
    assert (not validate_document(document, old=stored)) == case.is_good


def test_rules_say_the_same_words_there_and_here(jobs: JobApi) -> None:
    compared = 0
    for case in (case for case in rules.CASES if len(case.problems) == 1):
        (problem,) = validate_document(case.text)
        said = jobs.create(case.text)[1]["message"]
        if any(words in said for words in FROM_THE_SCHEMA):
            continue
        assert problem.path in said
        assert f"{problem.rule}; {problem.remedy}" in said
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("case", [case for case in CASES if case.is_good and not case.old], ids=lambda case: case.name)
def test_defaults_are_the_same_there_and_here(case: Case, jobs: JobApi) -> None:
    (document,) = read_job_documents(case.text)

    assert admit(document)["spec"] == jobs.create(case.text)[1]["spec"]


@pytest.mark.parametrize("seed", range(CHANCE_DOCUMENTS // 50))
def test_chance_changes_are_judged_alike(seed: int, jobs: JobApi) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        text = json.dumps(mutated(chance))
        code, answer = jobs.create(text)
        problems = validate_document(text)
        assert (code == 201) == (not problems), (text, answer.get("message"), list(map(str, problems)))
