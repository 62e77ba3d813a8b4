"""The command line as a user meets it: verdicts, exit statuses, and one line for bad input."""

from __future__ import annotations

import io
import json

import pytest

from gradprune import cli

SOURCE = """
def grpo(logp, old, adv, mask, ref=None, beta=0.04):
    ratio = torch.exp(logp - old)
    per_token = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    if ref is not None:
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        per_token = per_token + beta * kl
    return (per_token * mask).sum() / mask.sum().clamp(min=1)
"""


@pytest.fixture
def run(monkeypatch, capsys):
    def run_cli(*argv):
        monkeypatch.setattr("sys.argv", ["gradprune", *map(str, argv)])
        with pytest.raises(SystemExit) as status:
            cli.main()
        captured = capsys.readouterr()
        return status.value.code or 0, captured.out, captured.err

    return run_cli


@pytest.fixture
def loss_file(tmp_path):
    path = tmp_path / "pasted.py"
    path.write_text(SOURCE)
    return path


def test_explain_proves(run, loss_file):
    status, out, _ = run("explain", loss_file, "--zero", "adv * mask", "--wrt", "logp")
    assert status == 0
    assert out.startswith("proved: every gradient of grpo is exactly zero")


def test_explain_refuses_and_names_the_line(run, loss_file):
    status, out, _ = run("explain", f"{loss_file}:grpo", "--zero", "adv * mask", "--wrt", "logp", "--shape", "ref=6x8")
    assert status == 1
    assert "pasted.py:7: per_token = per_token + beta * kl" in out


def test_explain_reads_configuration(run, loss_file):
    command = ("explain", loss_file, "--zero", "adv * mask", "--wrt", "logp", "--shape", "ref=6x8", "--json")
    assert json.loads(run(*command, "--set", "beta=0.0")[1])["proved"]
    assert not json.loads(run(*command, "--set", "beta=0.1")[1])["proved"]


def test_explain_reads_stdin(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(SOURCE))
    assert run("explain", "-", "--zero", "adv * mask", "--wrt", "logp")[0] == 0


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("nowhere.py", (), "nowhere.py does not exist: pass file.py:function"),
        ("{file}:grp", (), "has no function 'grp': it has grpo"),
        ("{file}", ("--shape", "logp=8xx"), "--shape logp=8xx: write sizes and a dtype"),
        ("{file}", ("--shape", "old2=8"), "grpo has no parameter 'old2'"),
        ("{file}", ("--zero", "adv * maks"), "zero names 'maks', which the loss does not take"),
    ],
)
def test_explain_reports_bad_input_in_one_line(run, loss_file, place, options, message):
    status, out, err = run("explain", place.format(file=loss_file), "--wrt", "logp", "--zero", "adv * mask", *options)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def write_rollout(tmp_path, rewards, length=100):
    path = tmp_path / "rollout.jsonl"
    path.write_text("".join(json.dumps({"length": length, "reward": reward}) + "\n" for reward in rewards))
    return path


def test_estimate_of_a_half_dead_rollout(run, tmp_path):
    rollout = write_rollout(tmp_path, [1, 1, 1, 1, 0, 1, 0, 1])
    out = run("estimate", rollout, "--group-size", 4, "--token-budget", 400, "--json")[1]
    figures = json.loads(out)
    # Forward 1, backward 2 a token: unpruned 8 * 100 * 3 = 2400, pruned 4 * 100 * 3 + 4 * 100 = 1600.
    assert (figures["unpruned"], figures["pruned"], figures["dead_groups"]) == (2400, 1600, 0.5)
    assert figures["saving"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("records", "group_size", "message"),
    [
        ('{"length": 3, "reward": 1}', 0, "group_size is 0"),
        ('{"length": 3, "reward": 1}', -1, "group_size is -1"),
        ('{"length": 3, "reward": 1}\n{"length": 3, "advantage": 0}', 1, "record 1 has an advantage and no reward"),
    ],
)
def test_estimate_reports_bad_groups_in_one_line(run, tmp_path, records, group_size, message):
    path = tmp_path / "rollout.jsonl"
    path.write_text(records)
    status, _, err = run("estimate", path, f"--group-size={group_size}")
    assert status == 2 and message in err and "Traceback" not in err


def test_estimate_names_the_bad_line(run, tmp_path):
    path = tmp_path / "rollout.jsonl"
    path.write_text('{"length": 3, "reward": 1}\n{"length": 3}\n')
    status, _, err = run("estimate", path, "--group-size", 1)
    assert status == 2
    assert "rollout.jsonl:2: each record needs length, and advantage or reward" in err
