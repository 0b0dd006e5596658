"""Prints all keys with a prefix, and then every change: `python follow.py localhost:7400 stock/`. Ctrl-C ends it."""

import sys

import orthodrome
from orthodrome import KeyRange


def show(key: bytes, value: bytes | None) -> None:
    print(key.decode(), "was deleted" if value is None else f"= {value.decode()}", flush=True)


def follow(db: orthodrome.Client, span: KeyRange) -> None:
    with db.watch(span) as watch:
        # Once it has begun, no change is missed: what is not in the scan comes later. Some changes are in both.
        next(watch)
        page = db.scan(span)
        while True:
            for key, value in page.rows:
                show(key, value)
            if page.rest is None:
                break
            page = db.scan(page.rest)
        for batch in watch:
            for change in batch.changes:
                show(change.key, change.value)


def main() -> None:
    endpoints, prefix = sys.argv[1:]
    with orthodrome.connect(endpoints) as db:
        while True:
            try:
                follow(db, KeyRange.prefix(prefix))
            except orthodrome.ForgottenError:
                # It was away for too long. The servers have the newest values.
                print("some changes are missing; all keys again:")
            except KeyboardInterrupt:
                return


if __name__ == "__main__":
    main()
