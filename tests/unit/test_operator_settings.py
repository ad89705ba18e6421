"""What an operator process is told, by flag, environment or default."""

import pytest

from ctj_operator.cluster.settings import describe, parse_settings


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {"CTJ_OPERATOR_WORKERS": "7", "CTJ_OPERATOR_DEFAULT_IMAGE": "a:1", "POD_NAMESPACE": "ctj-system"}
    settings = parse_settings(["--default-image", "b:1"], environment)
    assert (settings.default_image, settings.workers, settings.metrics_port) == ("b:1", 7, 8080)
    assert settings.lease_namespace == "ctj-system"


def test_namespaces_may_be_several_or_none_for_the_whole_cluster() -> None:
    assert parse_settings([], {}).namespaces == ()
    assert parse_settings(["--namespace", "a", "--namespace", "b"], {}).namespaces == ("a", "b")


def test_two_processes_are_never_the_same_contender() -> None:
    assert parse_settings([], {}).identity != parse_settings([], {}).identity


def test_everything_is_said_on_one_line() -> None:
    line = describe(parse_settings(["--checkpoint-claim", "shared", "--compile-cache-claim", "warm"], {}))
    assert "checkpoint_claim='shared' compile_cache_claim='warm'" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers is 0; at least 1 is needed"),
        (["--lease-seconds", "0.5"], "--lease-seconds is 0.5"),
        (["--workers", "many"], "invalid int value: 'many'"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_what_cannot_work_ends_the_start_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_settings(arguments, {})
    assert message in capsys.readouterr().err
