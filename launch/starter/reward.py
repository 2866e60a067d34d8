"""The reward of this folder's recipe: what an answer is worth. `row` is the line of rows.jsonl that it answers."""


def right(response: str, row: dict[str, str]) -> float:
    said, wanted = response.split(), row["answer"].split()
    if said == wanted:
        return 1.0
    return 0.1 if sorted(said) == wanted else 0.0  # the right digits in a wrong order
