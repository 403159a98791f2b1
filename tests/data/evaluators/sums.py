"""A task of inspect-ai: sums, three answers to each."""

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums() -> Task:
    samples = [Sample(input=f"{i}+{i}=", target=str(2 * i)) for i in range(1, 5)]
    return Task(dataset=samples, solver=generate(), scorer=includes(), epochs=Epochs(3, "mean"))
