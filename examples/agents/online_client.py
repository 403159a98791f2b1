"""Episodes from outside: a program that a run did not start plays, rewards itself and says so.

    export AREAL_ADMIN_API_KEY=a-secret-of-your-own
    areal train examples/agents/online_grpo.yaml
    python examples/agents/online_client.py http://127.0.0.1:8700   # meanwhile, elsewhere

A product would be here: sessions of its users, and rewards when they are known.
"""

import os
import sys
import time

import httpx
from openai import OpenAI

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # its connections serve all sessions


def play(session: dict) -> float:
    """One answer to a question; `session["data"]` is the row of the data set that it is for."""
    client = CLIENT.with_options(base_url=session["base_url"], api_key=session["api_key"])
    reply = client.chat.completions.create(model="policy", messages=session["data"]["messages"])
    return float(session["data"]["answer"] in (reply.choices[0].message.content or ""))


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
    print(main(sys.argv[1]), "episodes")
