"""Moves money between two accounts, or nothing: `python transfer.py localhost:7400 alice bob 10`."""

import sys

import orthodrome


def transfer(db: orthodrome.Client, source: str, target: str, amount: int) -> int:
    """Returns what the source has left."""

    def move(txn: orthodrome.Transaction) -> int:
        # One round for both reads.
        left, right = (int(value or 0) for value in txn.get_all([source, target]))
        if left < amount:
            raise ValueError(f"{source} has {left}, which is less than {amount}")
        txn.put(source, str(left - amount))
        txn.put(target, str(right + amount))
        return left - amount

    return db.run(move, read=[source, target], write=[source, target])


def main() -> None:
    endpoint, source, target, amount = sys.argv[1:]
    with orthodrome.connect(endpoint) as db:
        try:
            left = transfer(db, f"account/{source}", f"account/{target}", int(amount))
        except orthodrome.OutcomeUnknown as doubt:
            # The answer was lost. It may take longer than the deadline until a gateway knows.
            print(f"unknown so far ({doubt.trouble}); asking again")
            doubt.resolve(timeout=60)
        else:
            print(f"{source} has {left} left")


if __name__ == "__main__":
    main()
