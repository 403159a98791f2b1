"""`env: harbor:FOLDER`: what a task may need, how it is graded, and what a failure is.

Harbor's package is tests/data/hubs/harbor; the real one is in test_real_hubs.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from sandbox_support import needs_sandbox

from areal.environments.calls import Calls
from areal.environments.hubs.catalog import check_env
from areal.environments.hubs.dockerfile import Copy, Run, Unsupported, read
from areal.environments.hubs.harbor import PROMPT
from areal.environments.hubs.harbor_tasks import Options, task_of
from areal.environments.interface import EnvError, checked_step
from areal.environments.load import environment_maker

WAIT_S = 900.0
CALLS = Calls("harbor", WAIT_S, max_concurrent=8)
DOCKERFILE = """\
FROM ubuntu:24.04
ENV GREETING="good day"
WORKDIR /app
COPY data/ ./data/
RUN sort data/numbers \\
    > sorted
"""
TEST = """\
#!/bin/bash
if [ "$(cat /app/answer)" = "$(cat /tests/expected)" ]
then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture(autouse=True)
def hub_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "data" / "hubs"))
    monkeypatch.setenv("AREAL_HARBOR_PYTHON", sys.executable)


@pytest.fixture
def hub():
    made = []

    def make(folder, **kwargs):
        made.append(environment_maker(f"harbor:{folder}", {"command_s": WAIT_S, **kwargs}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def write_task(folder: Path, *, test=TEST, dockerfile=DOCKERFILE, toml="", told="Sort them."):
    files = {
        "task.toml": f"[verifier]\ntimeout_sec = {WAIT_S}\n{toml}",
        "instruction.md": f"{told}\n",
        "environment/data/numbers": "3\n1\n2\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        "tests/expected": "1 2 3\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


async def play(envs, commands, seed=0):
    """(what the model saw, the reward) until the episode is over."""
    environment = envs()
    try:
        seen = [(await CALLS.run("reset", environment.reset, {"seed": seed}))[-1]["content"]]
        for command in commands:
            made = await CALLS.run("step", environment.step, command)
            step = checked_step(made, "step")
            if step.done:
                return seen, step.reward
            seen += [message["content"] for message in step.messages]
        return seen, None
    finally:
        await environment.close()


@needs_sandbox
async def test_a_task_is_set_up_worked_on_and_graded(tmp_path, hub):
    envs = hub(write_task(tmp_path))
    look = 'pwd; ls; cat data/numbers | wc -l; tr "\\n" " " < sorted; echo $GREETING'
    seen, reward = await play(envs, [look, "tr '\\n' ' ' < sorted > answer", "exit"])
    assert seen[0] == "Sort them." + PROMPT
    assert seen[1] == "/app\ndata\nsorted\n3\n1 2 3 good day" + PROMPT
    assert reward == 0.0  # "1 2 3 " is not "1 2 3"
    _, reward = await play(envs, ["echo 1 2 3 > answer", "exit"])
    assert reward == 1.0


@needs_sandbox
async def test_rewards_in_json_a_bound_on_commands_and_tools(tmp_path, hub):
    scores = '#!/bin/sh\necho \'{"reward": 0.25, "speed": 7}\' > /logs/verifier/reward.json\n'
    folder = write_task(tmp_path, test=scores)
    assert await play(hub(folder, max_commands=1), ["ls"]) == (["Sort them." + PROMPT], 0.25)
    environment = hub(folder, interface="tools", instructions="Be brief.")()
    first = await CALLS.run("reset", environment.reset, {"seed": 1})
    assert [message["content"] for message in first] == ["Be brief.", "Sort them."]
    assert [tool.name for tool in environment.tools] == [
        "python",
        "shell",
        "read_file",
        "write_file",
    ]
    assert await CALLS.run("step", environment.step, "done") == ("", 0.25, True)
    await environment.close()


CHEATS = {
    "a reward of its own": "echo 1 | tee /logs/verifier/reward.txt > /logs/verifier/reward.json",
    "a link to the tests": "ln -s /tests/expected answer",
    "a link by another name": "ln -s /workspace/.root/tests/expected answer",
    "a link in a folder": "mkdir d; ln -s ../../../tests d/t; ln -s d/t/expected answer",
    "a link by its process": "ln -s /proc/self/cwd/../tests/expected answer",
    "a name of two lines": 'n="$(printf \'a\nb\')"; ln -s /tests "$n"; ln -s "$n/expected" answer',
    "tests of its own": "cd /workspace/.root; mkdir tests; echo 7 | tee tests/expected app/answer",
    "its folder as a link": "cd /workspace/.root; rm -rf app; ln -s tests app",
    "no folder": "rm -rf /workspace/.root",
    "a closed folder": "chmod 000 /app",
    "a link that cannot be removed": (
        "ln -s /tests/expected answer; for x in 1 2 3; do ln -s data $x; done; chmod 555 ."
    ),
    "a package of its user": (
        "p=$(python3 -m site --user-site); mkdir -p $p; echo 'print(1, 2, 3)' > $p/usercustomize.py"
    ),
}


@needs_sandbox
async def test_a_model_that_cheats_earns_nothing(tmp_path, hub):
    test = TEST.replace("$(cat /app/answer)", "$(cd /tests; python3 -c ''; cat /app/answer)")
    envs = hub(write_task(tmp_path, test=test))
    for name, cheat in CHEATS.items():
        _, reward = await play(envs, [cheat, "exit"])
        assert reward == 0.0, name


VERDICTS = [
    ("echo no; exit 1", "task 0: the tests left no /logs/verifier/reward.txt; .*\nno\n"),
    ("echo much > /logs/verifier/reward.txt", "reward.txt holds b'much"),
    ("echo nan > /logs/verifier/reward.txt", "reward.txt holds nan, expected a number"),
    ('echo \'{"a":1,"b":2}\' > /logs/verifier/reward.json', "expected a number or 'reward'"),
    ("echo true > /logs/verifier/reward.json", "reward.json holds True"),
    ("printf '{' > /logs/verifier/reward.json", "reward.json holds b'{'"),
]


@needs_sandbox
async def test_tests_without_a_verdict_fail_the_episode(tmp_path, hub):
    for number, (test, _) in enumerate(VERDICTS):
        write_task(tmp_path / str(number), test=f"#!/bin/sh\n{test}\n")
    write_task(tmp_path / "last")  # held out
    envs = hub(tmp_path)
    for number, (_, says) in enumerate(VERDICTS):
        with pytest.raises(EnvError, match=f"(?s){says}"):
            await play(envs, ["exit"], seed=number)


@needs_sandbox
async def test_a_verdict_of_tests_that_did_not_end_is_none(tmp_path, hub):
    endless = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\nsleep 999\n"
    folder = write_task(tmp_path, test=endless)
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 3\n")
    with pytest.raises(EnvError):
        await play(hub(folder), ["exit"])


@needs_sandbox
async def test_a_build_makes_its_folders_and_sees_its_arguments(tmp_path, hub):
    made = "FROM ubuntu\nARG LEVEL=3\nWORKDIR /app/a\nRUN echo $LEVEL > x\nWORKDIR /app/b\n"
    made += "COPY data/numbers /opt/first\n"
    look = "pwd; cat ../a/x; head -1 /opt/first"
    seen, _ = await play(hub(write_task(tmp_path, dockerfile=made)), [look, "exit"])
    assert seen[1] == "/app/b\n3\n3" + PROMPT


@needs_sandbox
async def test_a_setup_that_fails_names_its_line(tmp_path, hub):
    folder = write_task(tmp_path, dockerfile=f"{DOCKERFILE}RUN cat nothing\n")
    with pytest.raises(EnvError, match=r"`/app sh -c cat nothing` failed .*nothing: No such file"):
        await play(hub(folder), ["exit"])


async def test_tasks_of_tests_are_held_out_and_unsupported_ones_refused_or_left_out(tmp_path, hub):
    for name in "abcde":
        write_task(tmp_path / name)
    envs = hub(tmp_path)
    drawn = {(await envs.task({"seed": seed})).name for seed in range(40)}
    tested = {(await envs.task({"seed": 1_000_000_000 + seed})).name for seed in range(9)}
    assert drawn == set("abcd") and tested == {"e"}
    with pytest.raises(EnvError, match="no whole number 'seed', found .*'question'"):
        await envs.task({"question": "?"})
    write_task(tmp_path / "b", dockerfile="FROM nvidia/cuda:13\n")
    needs = "1 of 5 tasks need more than a sandbox has: b: it needs the image nvidia/cuda:13"
    with pytest.raises(EnvError, match=f"{needs}.*env_kwargs.skip_unsupported leaves them out"):
        await hub(tmp_path).task({"seed": 0})
    left = hub(tmp_path, skip_unsupported=True)
    assert {(await left.task({"seed": seed})).name for seed in range(40)} == set("acd")
    (tmp_path / "c/tests/test.sh").unlink()
    with pytest.raises(EnvError, match="is no task of Harbor: .*tests/test.sh"):
        await hub(tmp_path).task({"seed": 0})
    with pytest.raises(EnvError, match="has no task.toml, and no folder in it has one"):
        await hub(tmp_path / "c/environment").task({"seed": 0})


@pytest.mark.parametrize(
    ("dockerfile", "says"),
    [
        ("FROM nginx:1", "the image nginx:1; if this machine .*env_kwargs.images"),
        ("FROM ubuntu\nRUN apt-get update", "Dockerfile:2: RUN uses apt-get.*skip_installs"),
        ("FROM ubuntu\nRUN cd /x && pip install a", "RUN uses pip,"),
        ("FROM ubuntu\nRUN python -m pip install a", "RUN uses pip,"),
        ("FROM ubuntu AS a\nFROM ubuntu", "Dockerfile:2: a second FROM"),
        ("FROM ubuntu\nCOPY --from=a /x /y", "COPY --from=a cannot be stood in for"),
        ("FROM ubuntu\nADD https://a.b/c /y", "addresses and archives"),
        ("FROM ubuntu\nCOPY data /usr/local/bin/x", "sandbox.writable: '/usr' cannot be a folder"),
        ('FROM ubuntu\nSHELL ["bash"]', "SHELL cannot be stood in for"),
        ("FROM ubuntu\nRUN <<EOF", "here-document"),
        ("FROM ubuntu\nRUN [1]", r"Dockerfile:2: \[1\] must be a list of texts"),
        ('FROM ubuntu\nCOPY ["a", 1]', "must be a list of texts"),
        ("FROM ubuntu\nCOPY " + "[" * 100_000, "COPY needs a source and a target"),
        ("FROM ubuntu\nCOPY x", "COPY needs a source and a target"),
        ("FROM ubuntu\nCOPY nothing /app/", "copies 'nothing', which does not exist"),
        ("FROM ubuntu\nCOPY data/numbers /numbers", "copies to /, which is read-only"),
        ("FROM ubuntu\nCOPY data .", "copies to /, which is read-only"),
        ("FROM ubuntu\nCOPY //etc /app/", "copies '//etc', which does not exist"),
        ("FROM ubuntu\nCOPY ../tests /app/", "tests leads out of its folder"),
        ("RUN ls", "no FROM"),
        ("FROM ubuntu\nRUN ls \\", "the last line is continued by none"),
        (b"FROM ubuntu\n# caf\xe9\n", "environment/Dockerfile is not UTF-8"),
        (b"#" * (1 << 20) + b"\n", "environment/Dockerfile has more than 1048576 bytes"),
        ("FROM ubuntu\nWORKDIR /a\0b", "sandbox.writable: '/a.x00b' cannot be"),
    ],
    ids=lambda given: given[:40],
)
def test_dockerfiles_that_no_sandbox_stands_in_for(tmp_path, dockerfile, says):
    folder = write_task(tmp_path)
    written = dockerfile if isinstance(dockerfile, bytes) else dockerfile.encode()
    (folder / "environment/Dockerfile").write_bytes(written)
    given = {"name": "x", "folder": str(folder), "instruction": "", "config": {}}
    with pytest.raises(Unsupported, match=says):
        task_of(given, Options())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"steps": [{"name": "a"}]}, "task.toml: steps is not run"),
        ({"environment": {"gpus": 1}}, "task.toml: environment.gpus is not run"),
        ({"environment": {"os": "windows"}}, "environment.os is 'windows'"),
        ({"verifier": {"timeout_sec": float("inf")}}, "task.toml: verifier: sandbox.wall_s must"),
        ({"environment": {"env": {"KEY": "${HOST_KEY}"}}}, "environment.env.KEY is a variable of"),
        ({"verifier": {"env": {"KEY": "${HOST_KEY}"}}}, "verifier.env.KEY is a variable of"),
        (
            {"environment": {"network_mode": "allowlist", "allowed_hosts": ["a.org"]}},
            "it needs a.org; list what it may reach in env_kwargs.network",
        ),
    ],
)
def test_tasks_that_need_more_than_a_sandbox(tmp_path, config, says):
    given = {"name": "x", "folder": str(write_task(tmp_path)), "instruction": "", "config": config}
    with pytest.raises(Unsupported, match=says):
        task_of(given, Options())


def test_a_compose_file_is_refused_and_options_open_doors(tmp_path):
    installs = "FROM docker.io/library/nginx:1\nRUN apt-get install -y x\nWORKDIR /home/me/x\n"
    folder = write_task(tmp_path, dockerfile=installs)
    given = {"name": "x", "folder": str(folder), "instruction": "", "config": {}}
    options = Options.of(
        {"images": ["nginx"], "skip_installs": True, "writable": ["/data"], "network": ["a.org:80"]}
    )
    task = task_of(given, options)
    assert task.actions == () and task.limits.network == ("a.org:80",)
    assert task.limits.writable == ("/data", "/home/me", "/logs")
    assert task.limits.workdir == "/home/me/x" and "/tests" not in task.limits.writable
    (folder / "tests/test.sh").unlink()
    with pytest.raises(Unsupported, match=r"it has no tests/test.sh"):
        task_of(given, options)
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    with pytest.raises(Unsupported, match=r"docker-compose.yaml: several containers"):
        task_of(given, options)


def test_what_is_read_of_a_dockerfile(tmp_path):
    plan = read(
        "# a comment\nARG BASE=ubuntu\nFROM --platform=linux/amd64 ${BASE}:24.04 AS main\n"
        "ENV A=1 B='two words'\nENV OLD some text\nWORKDIR /srv\nWORKDIR $A/x\n"
        'COPY --chown=1:1 ["a b", "c/"]\nCOPY *.txt d /opt/data/\nRUN ["ls", "-l"]\n'
        'RUN echo "$A" && \\\n  # inside\n  true\nCMD ["sleep"]\nRUN\t[ -f a ] || touch a\n'
    )
    assert (plan.image, plan.workdir) == ("ubuntu:24.04", "/srv/1/x")
    assert plan.env == {"A": "1", "B": "two words", "OLD": "some text"}
    assert plan.actions == [
        Copy(("a b",), "/srv/1/x/c/"),
        Copy(("*.txt", "d"), "/opt/data/"),
        Run(("ls", "-l"), "/srv/1/x"),
        Run(("sh", "-c", 'echo "$A" &&    true'), "/srv/1/x"),
        Run(("sh", "-c", "[ -f a ] || touch a"), "/srv/1/x"),
    ]


def test_files_outside_of_a_task_are_not_copied(tmp_path):
    (tmp_path / "secret").write_text("sesame")
    folder = write_task(tmp_path / "task", dockerfile="FROM ubuntu\nCOPY link /app/\n")
    (folder / "environment/link").symlink_to(tmp_path / "secret")
    given = {"name": "x", "folder": str(folder), "instruction": "", "config": {}}
    with pytest.raises(Unsupported, match="leads out of its folder"):
        task_of(given, Options())
    (folder / "environment/link").unlink()
    (folder / "environment/link").mkdir()
    task = task_of(given, Options())
    (folder / "environment/link/inner").symlink_to(tmp_path / "secret")
    with pytest.raises(Unsupported, match="leads out of its folder"):
        task.copied(task.actions[0])
    for source in ("..", "../../secret", "nothing"):
        with pytest.raises(Unsupported, match="leads out|does not exist"):
            task.copied(Copy((source,), "/app/"))


def test_files_that_cannot_be_copied_are_named_and_nothing_waits_for_them(tmp_path):
    folder = write_task(tmp_path, dockerfile="FROM ubuntu\nCOPY data/* /app/\n")
    given = {"name": "x", "folder": str(folder), "instruction": "", "config": {}}
    task = task_of(given, Options(max_disk_mb=1))
    data = folder / "environment/data"
    os.mkfifo(data / "pipe")
    with pytest.raises(Unsupported, match="data/pipe is neither a file nor a folder"):
        task.copied(task.actions[0])
    (data / "pipe").unlink()
    (data / "loop").symlink_to("loop")
    with pytest.raises(Unsupported, match="data/loop cannot be read: Too many levels"):
        task.copied(task.actions[0])
    (data / "loop").unlink()
    with (data / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unsupported, match="large does not fit any more; raise env_kwargs.max_disk"):
        task.copied(task.actions[0])


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"image": "x"}, "env_kwargs.image: unknown for harbor; expected one of interface"),
        ({"images": "x"}, "env_kwargs.images: expected a list"),
        ({"interface": "chat"}, "env_kwargs.interface must be 'commands' or 'tools'"),
        ({"max_commands": 0}, "env_kwargs.max_commands must be at least 1"),
        ({"network": ["10.0.0.1:80"]}, "sandbox.network"),
        ({"command_s": -1}, "sandbox.wall_s must be above 0"),
    ],
)
def test_mistakes_are_named(tmp_path, kwargs, says):
    with pytest.raises(ValueError, match=says):
        environment_maker(f"harbor:{tmp_path}", kwargs)
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        check_env("harbor:nowhere")
