"""Episodes from outside: a program that a run did not start plays, rewards itself and says so.

    export AREAL_ADMIN_API_KEY=a-secret-of-your-own
    areal train examples/agents/online_grpo.yaml
    python examples/agents/online_client.py http://127.0.0.1:8700   # meanwhile, elsewhere

A product would be here: sessions of its users, and rewards when they are known. A second argument
names one of areal's rewards, such as gsm8k; without it the program needs no areal.
"""

import os
import sys
import time

import httpx
from openai import OpenAI

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # its connections serve all sessions


def contains(prompt, completion, prompt_ids, completion_ids, answer, **row) -> float:
    return float(answer in completion)


def named(reward: str):
    from areal.reward import get_reward_fn  # late: a program outside may have no areal

    return get_reward_fn(reward)


def play(session: dict, reward_fn=contains) -> float:
    """One answer to a question; `session["data"]` is the row of the data set that it is for."""
    row = dict(session["data"])
    client = CLIENT.with_options(base_url=session["base_url"], api_key=session["api_key"])
    reply = client.chat.completions.create(model="policy", messages=row.pop("messages"))
    return reward_fn("", reply.choices[0].message.content or "", [], [], **row)


def main(url: str, play=play) -> int:
    """Waits for the run to begin and plays until it is over; returns the number of episodes."""
    admin = {"Authorization": f"Bearer {os.environ['AREAL_ADMIN_API_KEY']}"}
    episodes = 0
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        while True:
            try:
                started = http.post("/rl/start_session", headers=admin)
            except httpx.TransportError:
                if episodes:
                    return episodes
            else:
                if started.status_code != 429:
                    finish(http, started.raise_for_status().json(), play)
                    episodes += 1
                    continue
            time.sleep(0.5)  # no run yet, or it has enough sessions for now


def finish(http: httpx.Client, session: dict, play) -> None:
    reward = play(session)
    key = {"Authorization": f"Bearer {session['api_key']}"}
    http.post("/rl/end_session", headers=key, json={"reward": reward}).raise_for_status()


if __name__ == "__main__":
    chosen = named(sys.argv[2]) if len(sys.argv) > 2 else contains
    print(main(sys.argv[1], lambda session: play(session, chosen)), "episodes")
