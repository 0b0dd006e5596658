"""The client's rules, with gateways that answer by a script. `python -m unittest` in this folder runs them."""

from __future__ import annotations

import gc
import unittest
from collections.abc import Coroutine
from typing import Any

import grpc

import orthodrome
from orthodrome import Op, Priority
from orthodrome._engine import Engine, declare, Run
from orthodrome._gateways import Gateways
from orthodrome._runtime import drive
from orthodrome._session import Names, Session
from orthodrome.v1 import api_pb2 as api
from orthodrome.values import INITIAL, Read, TxnId, Version


class Status(grpc.RpcError):
    def __init__(
        self, code: grpc.StatusCode, details: str = "", *, marked: bool = False, register: bool = False
    ) -> None:
        self._code, self._details, self._marked, self._register = code, details, marked, register

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, str]]:
        marks = [("orthodrome-effect", "none")] if self._marked else []
        return [*marks, ("orthodrome-register", "again")] if self._register else marks


LOST = Status(grpc.StatusCode.UNAVAILABLE, "connection reset")
BUSY = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", marked=True)
COMMITTED = api.Outcome(committed=api.Committed(timestamp=7))
CONFLICT = api.Outcome(aborted=api.Aborted(reason=api.ABORT_REASON_CONFLICT, retryable=True))
GUARD = api.Outcome(aborted=api.Aborted(reason=api.ABORT_REASON_GUARD))


class Script:
    """A runtime whose gateways give the listed answers, in order. It never waits."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Any]] = []
        #: (endpoint, method, request), in order.
        self.asked: list[tuple[str, str, Any]] = []

    def channel(self, endpoint: str, credentials: object, options: object) -> str:
        return endpoint

    async def unary(self, channel: str, method: Any, request: Any, timeout: float, metadata: object) -> Any:
        name = method.path.rpartition("/")[2]
        if name == "Describe":
            return api.DescribeResponse(cluster="dev", region=int(channel[-1]))
        self.asked.append((channel, name, type(request).FromString(request.SerializeToString())))
        expected, answer = self.answers.pop(0)
        assert name == expected, f"{name} instead of {expected}"
        if isinstance(answer, Status):
            raise type(answer)(answer._code, answer._details, marked=answer._marked, register=answer._register)
        return answer

    async def sleep(self, seconds: float) -> None:
        pass

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    async def close(self, channels: object) -> None:
        pass


def engine(*answers: tuple[str, Any], general: bool = False) -> tuple[Engine, Script]:
    script = Script()
    made = Engine(script, Gateways(script, "localhost:1,localhost:2", None, None, 5), 10)
    made.limits = api.Limits(request_bytes_max=10_000, lease_ms=10_000)
    made.names = made._names[0] = Names(4)
    made.runs_general = general
    made.is_blocking = True
    script.answers = list(answers)
    return made, script




class Outcomes(unittest.TestCase):
    def execute(self, made: Engine, *ops: Op) -> Any:
        return drive(made.execute(ops or [Op.put("k", "v")], made.options(Priority.LOW, None)))

    def test_lost_answer_is_resolved_at_another_gateway_under_the_same_name(self) -> None:
        made, script = engine(("Execute", LOST), ("Resolve", api.ResolveResponse(outcome=COMMITTED)))
        self.assertEqual(self.execute(made).timestamp, 7)
        (_, _, sent), (endpoint, _, question) = script.asked
        self.assertEqual(endpoint, "localhost:2")
        self.assertEqual(question.procedure, sent)

    def test_marked_refusal_is_repeated_and_not_resolved(self) -> None:
        made, script = engine(("Execute", BUSY), ("Execute", api.ExecuteResponse(outcome=COMMITTED)))
        self.execute(made)
        self.assertEqual(script.asked[0][2].txn, script.asked[1][2].txn)

    def test_failed_connection_is_not_resolved(self) -> None:
        refused = Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: refused")
        registered = ("Register", api.RegisterResponse(client=5))
        made, script = engine(("Execute", refused), registered, ("Execute", api.ExecuteResponse(outcome=COMMITTED)))
        self.execute(made)
        self.assertEqual([asked[0] for asked in script.asked[1:]], ["localhost:2"] * 2)
        # At another gateway the work continues as a new transaction of another client.
        self.assertEqual(script.asked[2][2].txn, api.TxnId(client=5, counter=1))

    def test_gateway_that_does_not_know_the_client_registers_it_again(self) -> None:
        unknown = Status(grpc.StatusCode.FAILED_PRECONDITION, "register here again", marked=True, register=True)
        registered = ("Register", api.RegisterResponse(client=6))
        made, script = engine(("Execute", unknown), registered, ("Execute", api.ExecuteResponse(outcome=COMMITTED)))
        self.execute(made)
        self.assertEqual(script.asked[2][2].txn, api.TxnId(client=6, counter=1))

    def test_retryable_abort_is_retried_under_the_next_attempt(self) -> None:
        again = ("Execute", api.ExecuteResponse(outcome=CONFLICT))
        made, script = engine(again, again, ("Execute", api.ExecuteResponse(outcome=COMMITTED)))
        self.execute(made)
        self.assertEqual([asked[2].txn.attempt for asked in script.asked], [0, 1, 2])

    def test_failed_guard_is_not_retried(self) -> None:
        made, _ = engine(("Execute", api.ExecuteResponse(outcome=GUARD)))
        with self.assertRaises(orthodrome.GuardFailed) as caught:
            self.execute(made, Op.compare("k", None))
        self.assertFalse(caught.exception.retryable)

    def test_unknown_outcome_keeps_its_name_until_it_is_dropped(self) -> None:
        made, script = engine(("Execute", LOST), *[("Resolve", LOST)] * 2000)
        options = made.options(Priority.LOW, 0.05)
        try:
            drive(made.execute([Op.put("k", "v")], options))
            self.fail("the outcome is unknown")
        except orthodrome.OutcomeUnknown as error:
            doubt = error.with_traceback(None)
        self.assertEqual(doubt.txn, TxnId(4, 1, 0))
        made.names.take()
        self.assertEqual(made.names.acknowledged_below(), 1)
        script.answers = [("Resolve", api.ResolveResponse(outcome=COMMITTED))]
        self.assertEqual(doubt.resolve().timestamp, 7)
        # What it wrote is known from now on.
        self.assertTrue(made.session.is_ahead_of({b"k": Read(b"old", Version(6, TxnId(1, 1, 0)))}))
        del doubt
        gc.collect()
        self.assertEqual(made.names.acknowledged_below(), 3)

    def test_refusal_of_the_request_names_the_field(self) -> None:
        wrong = Status(grpc.StatusCode.INVALID_ARGUMENT, "ops[0]: the key is empty", marked=True)
        made, _ = engine(("Execute", wrong))
        with self.assertRaisesRegex(orthodrome.InvalidError, r"localhost:1: ops\[0\]"):
            self.execute(made)

    def test_request_over_the_limit_is_not_sent(self) -> None:
        made, _ = engine()
        with self.assertRaisesRegex(orthodrome.InvalidError, "at most 10000"):
            self.execute(made, Op.put("k", b"x" * 10_000))


class Transactions(unittest.TestCase):
    def opened(self, value: bytes, timestamp: int) -> tuple[str, api.BeginResponse]:
        version = api.Version(timestamp=timestamp, writer=api.TxnId(client=1, counter=1))
        read = api.KeyRead(key=b"k", value=value, version=version)
        return ("Begin", api.BeginResponse(opened=api.Opened(reads=[read])))

    def test_lost_commit_is_resolved_with_reads_and_writes(self) -> None:
        made, script = engine(
            self.opened(b"1", 5), ("Commit", LOST), ("Resolve", api.ResolveResponse(outcome=COMMITTED))
        )
        attempt = self.run_once(made)
        self.assertEqual(attempt.committed.timestamp, 7)
        question = script.asked[2][2]
        self.assertEqual(question.interactive.write_keys, [b"k"])
        self.assertEqual(question.reads[0].version.timestamp, 5)
        self.assertEqual(question.commit.writes[0].value, b"2")

    def run_once(self, made: Engine) -> Any:
        runs = Run(made, declare(["k"], ["k"]), made.options(Priority.LOW, None))
        attempt = drive(runs.begin())
        drive(attempt.get_all(["k"]))
        attempt.write("k", "2")
        self.assertTrue(drive(runs.commit(attempt)))
        return attempt

    def test_reads_older_than_own_writes_are_not_shown(self) -> None:
        made, script = engine(
            self.opened(b"old", 5),
            ("Abort", api.AbortResponse()),
            self.opened(b"new", 9),
            ("Commit", api.CommitResponse(outcome=COMMITTED)),
        )
        made.session.wrote(8, {b"k": b"new"})
        self.assertEqual(self.run_once(made).reads["k"], b"new")
        session = script.asked[0][2].session[0]
        self.assertEqual((session.key, session.timestamp, session.deleted), (b"k", 8, False))

    def test_undeclared_keys_are_refused(self) -> None:
        made, _ = engine(self.opened(b"1", 5))
        attempt = drive(Run(made, declare(["k"], []), made.options(Priority.LOW, None)).begin())
        with self.assertRaisesRegex(orthodrome.InvalidError, "write"):
            attempt.write("k", "2")
        with self.assertRaisesRegex(orthodrome.InvalidError, "read"):
            drive(attempt.get_all(["other"]))

    def seen(self, value: bytes, timestamp: int) -> tuple[str, api.ReadResponse]:
        reads = self.opened(value, timestamp)[1].opened.reads
        return ("Read", api.ReadResponse(outcome=COMMITTED, reads=reads))

    def overtaken(self, *later: tuple[str, Any]) -> tuple[Run, Any, Script]:
        """The attempt after one that read `k` and found it changed at its end."""
        changed = (self.seen(b"1", 5), self.opened(b"2", 6), ("Abort", api.AbortResponse()))
        made, script = engine(*changed, *later)
        runs = Run(made, None, made.options(Priority.LOW, None))
        attempt = drive(runs.begin())
        self.assertEqual(drive(attempt.get_all(["k"])), [b"1"])
        attempt.write("k", "new")
        self.assertFalse(drive(runs.commit(attempt)))
        return runs, drive(runs.begin()), script

    def test_attempt_after_a_change_declares_its_keys_before_it_reads(self) -> None:
        commit = ("Commit", api.CommitResponse(outcome=COMMITTED))
        runs, attempt, script = self.overtaken(self.opened(b"3", 7), commit)
        self.assertEqual(drive(attempt.get_all(["k"])), [b"3"])
        attempt.write("k", "4")
        self.assertTrue(drive(runs.commit(attempt)))
        begin = script.asked[3][2]
        self.assertEqual((begin.read_keys, begin.write_keys), ([b"k"], [b"k"]))
        self.assertEqual(script.asked[4][2].writes[0].value, b"4")

    def test_attempt_that_needs_another_key_looks_again(self) -> None:
        commit = ("Commit", api.CommitResponse(outcome=COMMITTED))
        runs, attempt, script = self.overtaken(self.opened(b"3", 7), self.opened(b"3", 7), commit)
        attempt.write("other", "4")
        self.assertTrue(drive(runs.commit(attempt)))
        declared, at_end = script.asked[3][2], script.asked[4][2]
        self.assertEqual(at_end.write_keys, [b"other"])
        self.assertNotEqual(at_end.txn.counter, declared.txn.counter)

    def test_error_of_the_function_aborts_and_is_raised(self) -> None:
        made, script = engine(self.opened(b"1", 5), ("Abort", api.AbortResponse()))
        runs = Run(made, declare(["k"], []), made.options(Priority.LOW, None))
        with self.assertRaisesRegex(ValueError, "mine"):
            drive(runs.failed(drive(runs.begin()), ValueError("mine")))
        self.assertEqual(script.asked[1][1], "Abort")


class Sessions(unittest.TestCase):
    def test_floors_follow_the_newest_version_and_are_bounded(self) -> None:
        session = Session(keys_max=2, bytes_max=100)
        old, new = (Version(at, TxnId(1, at, 0)) for at in (4, 9))
        session.wrote(5, {b"k": b"v"})
        self.assertTrue(session.is_ahead_of({b"k": Read(None, INITIAL)}))
        self.assertTrue(session.is_ahead_of({b"k": Read(b"", old)}))
        self.assertFalse(session.is_ahead_of({b"k": Read(b"", new)}))
        session.wrote(6, {b"k": None})
        self.assertFalse(session.is_ahead_of({b"k": Read(None, INITIAL)}), "a forgotten deletion is not stale")
        session.ran(7, [Op.get("r"), Op.put("p", "1"), Op.call("x", [], ["c"])])
        known = {one.key: one.deleted for one in session.known([b"k", b"r", b"p", b"c"])}
        self.assertEqual(known, {b"p": False, b"c": True}, "it forgets what it saw longest ago")

    def test_names_below_every_live_name_are_acknowledged(self) -> None:
        names = Names(4)
        first, second, third = names.take(), names.take(), names.take()
        self.assertEqual(names.acknowledged_below(), 1)
        del first, third
        self.assertEqual(names.acknowledged_below(), 2)
        second.begin_at(names, 0)
        second.retry()
        self.assertEqual(str(second.id), "c4.2#1")
        second.begin_at(names, 1)
        self.assertEqual(str(second.id), "c4.4")
        self.assertEqual(names.acknowledged_below(), 4)


class Arguments(unittest.TestCase):
    def test_unusable_configurations_are_rejected_by_name(self) -> None:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("", {}, "at least one"),
            ("example", {}, "'example'"),
            ("http://localhost:1", {}, "host:port"),
            ("localhost:99999", {}, "host:port"),
            ("db.example:1", {"token": "t"}, "unencrypted"),
            ("localhost:1", {"token": "t\n"}, "token"),
            ("localhost:1", {"timeout": 0}, "timeout"),
            ("localhost:1", {"tls": orthodrome.Tls(b"no pem")}, "tls.authority"),
        ]
        for endpoint, options, expected in cases:
            with self.subTest(endpoint=endpoint, **options):
                with self.assertRaisesRegex(orthodrome.ConfigError, expected):
                    orthodrome.connect(endpoint, **options)

    def test_wrong_types_are_rejected_by_name(self) -> None:
        with self.assertRaisesRegex(TypeError, "key must be str or bytes, not int: 7"):
            Op.get(7)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, r"use \['key'\]"):
            declare("key", None)
        with self.assertRaisesRegex(ValueError, "64 bits"):
            Op.add("k", 2**63)

    def test_no_form_of_tls_shows_the_key(self) -> None:
        self.assertNotIn("hush", repr(orthodrome.Tls(b"a", key=b"hush")))


if __name__ == "__main__":
    unittest.main()
