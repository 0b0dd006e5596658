"""The client with TLS and a token, on a protocol that runs transactions in rounds at the gateway. Prints `done`.

    python secure.py ENDPOINT AUTHORITY TOKEN_FILE"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import orthodrome
from orthodrome import Tls


def check(found: object, expected: object) -> None:
    assert found == expected, f"{found!r} instead of {expected!r}"


def main() -> None:
    endpoint, authority, token_file = sys.argv[1:]
    tls, token = Tls(Path(authority)), Path(token_file).read_text().strip()
    try:
        orthodrome.connect(endpoint, tls=tls, token="wrong")
        raise AssertionError("the token is wrong")
    except orthodrome.UnauthenticatedError as error:
        assert endpoint in str(error), error
    try:
        orthodrome.connect(endpoint, timeout=1)
        raise AssertionError("the node speaks only TLS")
    except orthodrome.UnreachableError as error:
        assert endpoint in str(error), error
    with orthodrome.connect(endpoint, tls=tls, token=token) as db:
        check(db.describe().keyspaces[0].general, True)

        def step(txn: orthodrome.Transaction) -> int:
            # Two rounds, under the locks of the transaction.
            which = txn.get_text("which") or "a"
            value = int(txn.get(f"count/{which}") or 0) + 1
            txn.put(f"count/{which}", str(value))
            return value

        threads = [threading.Thread(target=db.run, args=(step,), kwargs={"timeout": 60}) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(db.get("count/a"), b"4")
        with db.transaction() as txn:
            check(txn.get_all(["which", "count/a"]), [None, b"4"])
            check(txn.get_text("none"), None)
        with db.watch(orthodrome.KeyRange.prefix("count/")) as watch:
            next(watch)
            db.put("count/b", "1")
            batch = next(batch for batch in watch if b"count/b" in {change.key for change in batch.changes})
            check(batch.changes[-1].value, b"1")
    print("done")


main()
