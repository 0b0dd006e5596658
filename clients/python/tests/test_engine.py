"""The client's rules, with gateways that answer by a script. `python -m unittest` in this folder runs them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import unittest
from collections.abc import Coroutine, Iterator
from concurrent import futures
from typing import Any
from unittest import mock

import grpc

import orthodrome
import orthodrome.aio
from orthodrome import Change, Changes, KeyRange, Lease, LeaseEndedError, LeaseInfo, Op, Priority
from orthodrome._engine import Engine, Renewal, Run, Watching, declare
from orthodrome._gateways import Gateways
from orthodrome._runtime import Silence, drive
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
FORGOTTEN = api.Outcome(unknown=api.Unknown(is_forgotten=True))
GUARD = api.Outcome(aborted=api.Aborted(reason=api.ABORT_REASON_GUARD))
ENDED = Status(grpc.StatusCode.NOT_FOUND, "the lease has ended", marked=True)


class Script:
    """A runtime whose gateways give the listed answers, in order. It never waits."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Any]] = []
        #: (endpoint, method, request), in order.
        self.asked: list[tuple[str, str, Any]] = []
        #: The time, if it is scripted, too.
        self.now = 0.0

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

    async def stream(self, channel: str, method: Any, request: Any, timeout: float, metadata: object) -> Any:
        return Answers(await self.unary(channel, method, request, timeout, metadata))

    async def sleep(self, seconds: float) -> None:
        pass

    def signal(self) -> ScriptedSignal:
        return ScriptedSignal(self)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    async def close(self, channels: object) -> None:
        pass


class ScriptedSignal:
    """Waiting for it takes no time, but changes the time of the script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    async def wait(self, timeout: float | None) -> bool:
        if not self._is_set and timeout is not None:
            self._script.now += timeout
        return self._is_set


class Answers:
    """A stream that has the listed answers. An error among them is raised."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    async def next(self, timeout: float) -> Any:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> None:
        self.answers = []


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

    def test_forgotten_outcome_is_asked_once_of_each_gateway(self) -> None:
        forgotten = ("Resolve", api.ResolveResponse(outcome=FORGOTTEN))
        made, script = engine(("Execute", LOST), forgotten, forgotten)
        with self.assertRaisesRegex(orthodrome.OutcomeUnknown, "has forgotten the outcome"):
            self.execute(made)
        self.assertEqual([asked[0] for asked in script.asked[1:]], ["localhost:2", "localhost:1"])

    def test_outcome_that_one_gateway_has_forgotten_comes_from_another(self) -> None:
        forgotten = ("Resolve", api.ResolveResponse(outcome=FORGOTTEN))
        made, _ = engine(("Execute", LOST), forgotten, ("Resolve", api.ResolveResponse(outcome=COMMITTED)))
        self.assertEqual(self.execute(made).timestamp, 7)

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


LEASE = Lease("30000-9f86d081884c7d65")
GRANTED = ("GrantLease", api.GrantLeaseResponse(lease=LEASE.id, timestamp=7))
RENEWED = ("RenewLease", api.RenewLeaseResponse(timestamp=8))
REVOKED = ("RevokeLease", api.RevokeLeaseResponse(keys=3))
DESCRIBED = ("DescribeLease", api.DescribeLeaseResponse(left_ms=1500, keys=[b"a", b"b"], has_more=True))


class Leases(unittest.TestCase):
    """The calls, in both forms."""

    CALLS: list[tuple[tuple[str, Any], Any, Any]] = [
        (GRANTED, lambda db: db.grant_lease(30), LEASE),
        (RENEWED, lambda db: db.renew_lease(LEASE), None),
        (REVOKED, lambda db: db.revoke_lease(LEASE), 3),
        (DESCRIBED, lambda db: db.lease(LEASE), LeaseInfo(1.5, (b"a", b"b"), True)),
    ]

    def each(self, calls: Any = CALLS) -> Iterator[tuple[str, Any, Any, Any]]:
        """Each call, in each form: the name of its request, its answer, the call, and its result."""
        for (name, answer), call, result in calls:
            for is_async in (False, True):
                with self.subTest(call=name, is_async=is_async):
                    yield name, answer, call if not is_async else self.asynchronous(call), result

    @staticmethod
    def asynchronous(call: Any) -> Any:
        return lambda db: drive(call(orthodrome.aio.Client(db._engine)))

    def test_calls_send_their_requests_and_return_the_answers(self) -> None:
        for name, answer, call, result in self.each():
            made, script = engine((name, answer))
            self.assertEqual(call(orthodrome.Client(made)), result)
            request = script.asked[0][2]
            if name == "GrantLease":
                self.assertEqual(request.ttl_ms, 30_000)
            else:
                self.assertEqual(request.lease, LEASE.id)

    def test_lost_answer_is_repeated_at_another_gateway(self) -> None:
        for name, answer, call, result in self.each():
            made, script = engine((name, LOST), (name, answer))
            self.assertEqual(call(orthodrome.Client(made)), result)
            (first, _, sent), (second, _, again) = script.asked
            self.assertEqual((first, second), ("localhost:1", "localhost:2"))
            self.assertEqual(sent, again)

    def test_ended_lease_is_an_error_of_its_own_and_not_repeated(self) -> None:
        for name, _, call, _ in self.each(self.CALLS[1:]):
            made, script = engine((name, ENDED))
            with self.assertRaisesRegex(LeaseEndedError, "localhost:1: the lease has ended"):
                call(orthodrome.Client(made))
            self.assertEqual(len(script.asked), 1)

    def test_call_without_an_answer_until_the_deadline_is_an_error(self) -> None:
        made, _ = engine(*[("RenewLease", LOST)] * 2000)
        with self.assertRaisesRegex(orthodrome.DeadlineError, "connection reset"):
            orthodrome.Client(made).renew_lease(LEASE, timeout=0.02)

    def test_later_reads_find_the_granted_lease(self) -> None:
        made, _ = engine(GRANTED)
        orthodrome.Client(made).grant_lease(30)
        known = [(one.key, one.timestamp, one.deleted) for one in made.session.known([LEASE.record])]
        self.assertEqual(known, [(b"orthodrome/lease/{30000-9f86d081884c7d65}", 7, False)])
        self.assertTrue(made.session.is_ahead_of({LEASE.record: Read(None, INITIAL)}))

    def test_invalid_id_in_a_grant_is_unexpected(self) -> None:
        made, _ = engine(("GrantLease", api.GrantLeaseResponse(lease="30000-7", timestamp=7)))
        with self.assertRaisesRegex(orthodrome.UnexpectedError, "'30000-7' is not the id"):
            orthodrome.Client(made).grant_lease(30)

    def test_time_out_of_bounds_is_rejected(self) -> None:
        made, _ = engine()
        for ttl in (0, 0.9999, -5, 366 * 86_400 + 1, float("inf"), float("nan")):
            with self.subTest(ttl=ttl), self.assertRaisesRegex(ValueError, "ttl: "):
                orthodrome.Client(made).grant_lease(ttl)

    def test_time_is_rounded_to_milliseconds(self) -> None:
        made, script = engine(GRANTED)
        orthodrome.Client(made).grant_lease(1.001)
        self.assertEqual(script.asked[0][2].ttl_ms, 1001)

    def test_lease_names_its_keys(self) -> None:
        self.assertEqual(LEASE.ttl, 30.0)
        self.assertEqual(LEASE.record, b"orthodrome/lease/{30000-9f86d081884c7d65}")
        attachment = b"orthodrome/lease/{30000-9f86d081884c7d65}/key/k\xff"
        self.assertEqual(LEASE.attachment(b"k\xff"), attachment)
        self.assertEqual(LEASE.writes(b"k\xff"), [b"k\xff", attachment])
        compare, put, attach = (op._message for op in LEASE.put(b"k\xff", "v"))
        self.assertEqual(compare, api.Op(key=LEASE.record, compare=api.Compare(expected=b"")))
        self.assertEqual(put, api.Op(key=b"k\xff", put=b"v"))
        self.assertEqual(attach, api.Op(key=attachment, put=b""))

    def test_bounds_of_ids_are_those_of_the_servers(self) -> None:
        for id in ("1000-0000000000000000", "31622400000-ffffffffffffffff"):
            self.assertEqual(str(Lease(id)), id)
        self.assertEqual(Lease("1001-0000000000000000").ttl, 1.001)

    def test_malformed_ids_are_rejected(self) -> None:
        cases = [
            "", "-", "30000", "30000-", "30000-7", "30000-9F86D081884C7D65", "30000-9f86d081884c7d65\n",
            "30000-9f86d081884c7d650", "030000-9f86d081884c7d65", "+30000-9f86d081884c7d65", "30000_9f86d081884c7d65",
            "\u0663000-9f86d081884c7d65", "999-9f86d081884c7d65", "31622400001-9f86d081884c7d65",
            "{30000-9f86d081884c7d65}", "x" * 1000,
        ]
        for id in cases:
            with self.subTest(id=id):
                with self.assertRaisesRegex(ValueError, "an id looks like 30000-9f86d081884c7d65") as caught:
                    Lease(id)
                self.assertLess(len(str(caught.exception)), 200)


class Attached(unittest.TestCase):
    """Transactions that attach a key."""

    WRITES = {LEASE.attachment("k"): b"", b"k": b"v"}

    def read(self, value: bytes | None) -> list[api.KeyRead]:
        version = api.Version(timestamp=5, writer=api.TxnId(client=1, counter=1)) if value is not None else None
        return [api.KeyRead(key=LEASE.record, value=value, version=version)]

    def opened(self, value: bytes | None) -> tuple[str, api.BeginResponse]:
        return ("Begin", api.BeginResponse(opened=api.Opened(reads=self.read(value))))

    def put(self, made: Engine, **declared: Any) -> None:
        with orthodrome.Client(made).transaction(**declared) as txn:
            txn.put_attached(LEASE, "k", "v")

    def written(self, script: Script) -> dict[bytes, bytes]:
        name, request = script.asked[-1][1:]
        self.assertEqual(name, "Commit")
        return {write.key: write.value for write in request.writes}

    def test_declared_transaction_writes_the_key_and_its_attachment(self) -> None:
        made, script = engine(self.opened(b""), ("Commit", api.CommitResponse(outcome=COMMITTED)))
        self.put(made, read=[LEASE.record], write=LEASE.writes("k"))
        self.assertEqual(script.asked[0][2].read_keys, [LEASE.record])
        self.assertEqual(self.written(script), self.WRITES)

    def test_general_transaction_reads_the_record(self) -> None:
        made, script = engine(self.opened(b""), ("Commit", api.CommitResponse(outcome=COMMITTED)), general=True)
        self.put(made)
        self.assertEqual((script.asked[0][2].general, script.asked[0][2].read_keys), (True, [LEASE.record]))
        self.assertEqual(self.written(script), self.WRITES)

    def test_reconnaissance_commits_only_with_the_record(self) -> None:
        seen = ("Read", api.ReadResponse(outcome=COMMITTED, reads=self.read(b"")))
        made, script = engine(seen, self.opened(b""), ("Commit", api.CommitResponse(outcome=COMMITTED)))
        self.put(made)
        self.assertEqual(script.asked[1][2].read_keys, [LEASE.record])
        self.assertEqual(self.written(script), self.WRITES)

    def test_asyncio_transaction_writes_the_key_and_its_attachment(self) -> None:
        made, script = engine(self.opened(b""), ("Commit", api.CommitResponse(outcome=COMMITTED)), general=True)

        async def put() -> None:
            async with orthodrome.aio.Client(made).transaction() as txn:
                await txn.put_attached(LEASE, "k", "v")

        drive(put())
        self.assertEqual(self.written(script), self.WRITES)

    def test_ended_lease_aborts_the_transaction(self) -> None:
        cases: list[dict[str, Any]] = [{}, {"read": [LEASE.record], "write": LEASE.writes("k")}]
        for declared in cases:
            with self.subTest(**declared):
                made, script = engine(self.opened(None), ("Abort", api.AbortResponse()), general=True)
                with self.assertRaisesRegex(LeaseEndedError, LEASE.id):
                    self.put(made, **declared)
                self.assertEqual(script.asked[-1][1], "Abort")

    def test_ended_lease_ends_a_run(self) -> None:
        made, script = engine(self.opened(None), ("Abort", api.AbortResponse()), general=True)
        with self.assertRaises(LeaseEndedError):
            orthodrome.Client(made).run(lambda txn: txn.put_attached(LEASE, "k", "v"))
        self.assertEqual(len(script.asked), 2)

    def test_undeclared_keys_are_refused(self) -> None:
        for declared, expected in (
            ({"write": LEASE.writes("k")}, "in `read`"),
            ({"read": [LEASE.record], "write": ["k"]}, "key/k.*in `write`"),
            ({"read": [LEASE.record], "write": [LEASE.attachment("k")]}, "b'k'.*in `write`"),
        ):
            with self.subTest(**declared):
                opened = self.opened(b"") if "read" in declared else ("Begin", api.BeginResponse(opened=api.Opened()))
                made, _ = engine(opened, ("Abort", api.AbortResponse()))
                with self.assertRaisesRegex(orthodrome.InvalidError, expected):
                    self.put(made, **declared)


class Renewals(unittest.TestCase):
    """The renewal in the background, with scripted time."""

    def setUp(self) -> None:
        self.script = Script()
        clock = mock.patch("time.monotonic", lambda: self.script.now)
        clock.start()
        self.addCleanup(clock.stop)

    def renewal(self, *answers: tuple[str, Any]) -> Renewal:
        """A lease of 30 s, which was renewed at time 0."""
        made, self.script = engine(RENEWED, *answers)
        renewal = Renewal(made, LEASE)
        drive(renewal.begin(made.options(Priority.LOW, None)))
        return renewal

    def stop_after(self, renewal: Renewal, renewals: int) -> list[float]:
        """The times of some renewals, of which the last one is followed by `stop`."""
        times: list[float] = []
        unary = self.script.unary

        async def record(*arguments: Any) -> Any:
            times.append(self.script.now)
            if len(times) == renewals:
                renewal.stop()
            return await unary(*arguments)

        self.script.unary = record  # type: ignore[method-assign]
        drive(renewal._run())
        return times

    def test_lease_is_renewed_three_times_within_its_time(self) -> None:
        renewal = self.renewal(*[RENEWED] * 4)
        self.assertEqual(self.stop_after(renewal, 4), [10, 20, 30, 40])
        self.script.now = 69.9
        renewal.check()
        self.script.now = 70
        with self.assertRaisesRegex(LeaseEndedError, f"{LEASE.id} was not renewed in time"):
            renewal.check()

    def test_first_renewal_of_an_ended_lease_raises(self) -> None:
        made, script = engine(("RenewLease", ENDED))
        with self.assertRaises(LeaseEndedError):
            orthodrome.Client(made).keep_lease(LEASE)
        self.assertEqual(made._renewals, set())

    def test_time_counts_from_the_first_request_of_a_renewal(self) -> None:
        renewal = self.renewal(RENEWED)
        unary = self.script.unary

        async def slow(*arguments: Any) -> Any:
            self.script.now += 5
            return await unary(*arguments)

        self.script.unary = slow  # type: ignore[method-assign]
        renewal.stop = mock.Mock()  # type: ignore[method-assign]
        self.script.answers.append(("RenewLease", ENDED))
        drive(renewal._run())
        # Renewed at 10, answered at 15: it lives until 40. A third of the rest has passed before the next request.
        self.assertAlmostEqual(self.script.now, 15 + 25 / 3 + 5)
        self.assertEqual(renewal._ends, 40)

    def test_lost_answer_is_repeated(self) -> None:
        renewal = self.renewal(("RenewLease", LOST), RENEWED)
        self.assertEqual(self.stop_after(renewal, 2), [10, 10])
        self.assertEqual([asked[0] for asked in self.script.asked], ["localhost:1", "localhost:1", "localhost:2"])
        self.assertEqual(renewal._ends, 40)

    def test_renewal_ends_with_the_lease(self) -> None:
        renewal = self.renewal(("RenewLease", ENDED))
        drive(renewal._run())
        self.assertEqual(self.script.now, 10)
        for _ in range(2):
            with self.assertRaisesRegex(LeaseEndedError, "the lease has ended"):
                renewal.check()
        with self.assertRaises(LeaseEndedError):
            drive(renewal.wait(None))
        self.assertEqual(renewal._engine._renewals, set())

    def test_lease_that_cannot_be_renewed_is_taken_for_ended_in_time(self) -> None:
        refused = Status(grpc.StatusCode.PERMISSION_DENIED, "your role is read", marked=True)
        renewal = self.renewal(*[("RenewLease", refused)] * 100)
        drive(renewal._run())
        self.assertTrue(30 <= self.script.now < 30.1, self.script.now)
        with self.assertRaisesRegex(LeaseEndedError, "not renewed in time: not permitted: .*your role is read"):
            renewal.check()

    def test_lease_that_was_taken_for_ended_stays_so(self) -> None:
        renewal = self.renewal(RENEWED)
        self.script.now = 31
        with self.assertRaises(LeaseEndedError):
            renewal.check()
        drive(renewal._run())
        self.assertEqual(len(self.script.asked), 1)
        with self.assertRaises(LeaseEndedError):
            renewal.check()

    def test_suspended_program_finds_the_lease_ended_before_the_renewal_does(self) -> None:
        kept = orthodrome.KeptLease(self.renewal())
        kept.check()
        self.script.now = 30
        with self.assertRaises(LeaseEndedError):
            kept.check()

    def test_closed_client_renews_nothing(self) -> None:
        renewal = self.renewal()
        drive(renewal._engine.close())
        drive(renewal._run())
        renewal.check()
        self.assertEqual(len(self.script.asked), 1)

    def test_lease_of_a_block_is_revoked_at_its_end(self) -> None:
        for revoked in (REVOKED, ("RevokeLease", ENDED)):
            with self.subTest(revoked=revoked):
                made, script = engine(GRANTED, RENEWED, revoked)
                with orthodrome.Client(made).leased(30) as kept:
                    self.assertEqual(kept.lease, LEASE)
                self.assertEqual([asked[1] for asked in script.asked], ["GrantLease", "RenewLease", "RevokeLease"])

    def test_lease_of_a_block_that_raises_is_revoked(self) -> None:
        made, script = engine(GRANTED, RENEWED, REVOKED)
        with self.assertRaisesRegex(ValueError, "mine"), orthodrome.Client(made).leased(30):
            raise ValueError("mine")
        self.assertEqual(script.asked[-1][1], "RevokeLease")


def changed(key: bytes, value: bytes | None, timestamp: int) -> api.KeyRead:
    version = api.Version(timestamp=timestamp, writer=api.TxnId(client=1, counter=timestamp))
    return api.KeyRead(key=key, value=value, version=version)


def batch(through: int, *changes: api.KeyRead) -> api.WatchResponse:
    return api.WatchResponse(through=through, changes=changes)


def change(key: bytes, value: bytes | None, timestamp: int) -> Change:
    return Change(key, value, Version(timestamp, TxnId(1, timestamp, 0)))


class Watches(unittest.TestCase):
    REGISTERED = ("Register", api.RegisterResponse(client=5))

    def watch(self, *answers: tuple[str, Any], after: int | None = None, **options: Any) -> tuple[Any, Script, Engine]:
        made, script = engine(*answers)
        timeout, keys_only = options.get("timeout"), options.get("keys_only", False)
        span = KeyRange.prefix("k")
        return Watching(made, span, after, keys_only, made.options(Priority.LOW, timeout)), script, made

    def test_parts_of_a_batch_are_returned_together(self) -> None:
        parts = [batch(0, changed(b"k1", b"v", 5)), batch(0, changed(b"k2", None, 5)), batch(6), batch(7)]
        watch, script, _ = self.watch(("Watch", parts), after=4)
        self.assertEqual(drive(watch.next()), Changes((change(b"k1", b"v", 5), change(b"k2", None, 5)), 6))
        self.assertEqual(drive(watch.next()), Changes((), 7))
        request = script.asked[0][2]
        self.assertEqual((getattr(request, "from"), request.until, request.after), (b"k", b"l", 4))

    def test_watch_without_a_beginning_sends_none(self) -> None:
        watch, script, _ = self.watch(("Watch", [batch(6)]))
        drive(watch.next())
        self.assertFalse(script.asked[0][2].HasField("after"))

    def test_watch_continues_elsewhere_after_the_last_whole_batch(self) -> None:
        for trouble in (LOST, Silence(), None):
            with self.subTest(trouble=trouble):
                first = [batch(4), batch(0, changed(b"k1", b"v", 5)), trouble]
                second = [batch(6, changed(b"k1", b"v", 5), changed(b"k2", b"v", 6))]
                watch, script, _ = self.watch(("Watch", first), self.REGISTERED, ("Watch", second))
                self.assertEqual(drive(watch.next()).through, 4)
                self.assertEqual(drive(watch.next()), Changes((change(b"k1", b"v", 5), change(b"k2", b"v", 6)), 6))
                self.assertEqual((script.asked[2][0], script.asked[2][2].after), ("localhost:2", 4))

    def test_refusal_of_a_busy_gateway_is_retried_there(self) -> None:
        watch, script, _ = self.watch(("Watch", [BUSY]), ("Watch", [batch(4)]))
        self.assertEqual(drive(watch.next()).through, 4)
        self.assertEqual(script.asked[1][0], "localhost:1")

    def test_deadline_begins_when_the_gateway_fails(self) -> None:
        class Late(Answers):
            async def next(self, timeout: float) -> Any:
                answer = await super().next(timeout)
                if answer is None:
                    time.sleep(0.02)
                    raise Silence
                return answer

        made, script = engine(self.REGISTERED)
        watch = Watching(made, KeyRange(), None, False, made.options(Priority.LOW, 0.01))
        watch._stream = Late([batch(4)])
        drive(watch.next())
        script.answers.append(("Watch", [batch(5)]))
        self.assertEqual(drive(watch.next()).through, 5)

    def test_watch_that_reaches_nobody_raises_and_can_go_on(self) -> None:
        refused = [Status(grpc.StatusCode.UNAVAILABLE, "stopping", marked=True)]
        rest = [("Watch", list(refused)) for _ in range(2000)]
        watch, script, _ = self.watch(
            ("Watch", [batch(4), *refused]), self.REGISTERED, *rest, timeout=0.02
        )
        drive(watch.next())
        with self.assertRaisesRegex(orthodrome.UnreachableError, "stopping"):
            drive(watch.next())
        script.answers = [("Watch", [batch(5)])]
        self.assertEqual(drive(watch.next()).through, 5)
        self.assertEqual(script.asked[-1][2].after, 4)

    def test_forgotten_changes_are_an_error_of_their_own(self) -> None:
        old = Status(grpc.StatusCode.OUT_OF_RANGE, "changes after 4 have been forgotten", marked=True)
        watch, _, _ = self.watch(("Watch", [old]), after=4)
        with self.assertRaisesRegex(orthodrome.ForgottenError, "changes after 4"):
            drive(watch.next())

    def test_later_reads_are_not_older_than_what_was_shown(self) -> None:
        changes = [batch(9, changed(b"k1", b"v", 8), changed(b"k2", None, 8), changed(b"k1", b"w", 9))]
        watch, _, made = self.watch(("Watch", list(changes)))
        drive(watch.next())
        known = {one.key: (one.timestamp, one.deleted) for one in made.session.known([b"k1", b"k2"])}
        self.assertEqual(known, {b"k1": (9, False), b"k2": (8, True)})
        # Without values nobody can tell a deletion.
        watch, _, made = self.watch(("Watch", list(changes)), keys_only=True)
        drive(watch.next())
        self.assertEqual(made.session.known([b"k1", b"k2"]), [])

    def test_closed_watch_ends(self) -> None:
        watch, script, _ = self.watch(("Watch", [batch(4), batch(5)]))
        drive(watch.next())
        watch.close()
        self.assertIsNone(drive(watch.next()))
        self.assertIsNone(drive(watch.next()))
        self.assertEqual(len(script.asked), 1)

    def test_invalid_arguments_are_rejected(self) -> None:
        made, _ = engine()
        options = made.options(Priority.LOW, None)
        with self.assertRaisesRegex(orthodrome.InvalidError, "no key"):
            Watching(made, KeyRange(b"b", b"a"), None, False, options)
        with self.assertRaisesRegex(TypeError, "after must be"):
            Watching(made, KeyRange(), "now", False, options)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, "after: -1"):
            Watching(made, KeyRange(), -1, False, options)


class Gateway:
    """A gateway on a port of this machine. `serve(request)` gives the answers of a watch, and the call lasts until the
    client ends it. Of leases it grants one, of a second."""

    LEASE = Lease("1000-9f86d081884c7d65")

    def __init__(self) -> None:
        #: The calls about the lease, in order.
        self.calls: list[str] = []
        #: The lease has not ended.
        self.lives = True
        #: How long a renewal takes.
        self.delay = 0.0
        self.requests: list[api.WatchRequest] = []
        self.ended = threading.Semaphore(0)
        self.serve: Any = None
        #: False: does not accept watches, and does not refuse them.
        self.accepts = True
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        registered = api.RegisterResponse(client=4, limits=api.Limits(request_bytes_max=10_000))
        registered.cluster.cluster = "dev"

        def handler(method: Any, answer: Any, form: Any = grpc.unary_unary_rpc_method_handler) -> Any:
            return form(method, answer.FromString, lambda message: message.SerializeToString())

        handlers = {
            "Register": handler(lambda request, context: registered, api.RegisterRequest),
            "Describe": handler(lambda request, context: registered.cluster, api.DescribeRequest),
            "Watch": handler(self._watch, api.WatchRequest, grpc.unary_stream_rpc_method_handler),
            "GrantLease": handler(lambda request, context: GRANTED_SHORT, api.GrantLeaseRequest),
            "RenewLease": handler(self._renew, api.RenewLeaseRequest),
            "RevokeLease": handler(self._revoke, api.RevokeLeaseRequest),
        }
        generic = grpc.method_handlers_generic_handler("orthodrome.v1.Orthodrome", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.endpoint = f"localhost:{self._server.add_insecure_port('localhost:0')}"
        self._server.start()

    def _watch(self, request: api.WatchRequest, context: Any) -> Iterator[api.WatchResponse]:
        over = threading.Event()
        context.add_callback(over.set)
        context.add_callback(self.ended.release)
        self.requests.append(request)
        if self.accepts:
            context.send_initial_metadata(())
            yield from self.serve(request)
        over.wait(10)

    def _renew(self, request: api.RenewLeaseRequest, context: Any) -> api.RenewLeaseResponse:
        if not self.lives:
            context.set_trailing_metadata((("orthodrome-effect", "none"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "the lease has ended")
        time.sleep(self.delay)
        self.calls.append("renew")
        return api.RenewLeaseResponse()

    def _revoke(self, request: api.RevokeLeaseRequest, context: Any) -> api.RevokeLeaseResponse:
        self.calls.append("revoke")
        return api.RevokeLeaseResponse()

    def stop(self) -> None:
        self._server.stop(None).wait()


GRANTED_SHORT = api.GrantLeaseResponse(lease=Gateway.LEASE.id, timestamp=5)


def once(request: api.WatchRequest) -> list[api.WatchResponse]:
    """One batch."""
    return [batch(request.after + 1, changed(b"k", b"v", request.after + 1))]


class Streams(unittest.TestCase):
    """Watches at gateways that speak gRPC."""

    def setUp(self) -> None:
        self.gateways = [Gateway(), Gateway()]
        self.endpoints = [gateway.endpoint for gateway in self.gateways]
        for gateway in self.gateways:
            gateway.serve = once
            self.addCleanup(gateway.stop)

    def watch(self, **options: Any) -> Any:
        db = orthodrome.connect(self.endpoints, **options)
        self.addCleanup(db.close)
        self.db = db
        return db.watch(KeyRange())

    def asked(self) -> list[list[int]]:
        return [[request.after for request in gateway.requests] for gateway in self.gateways]

    def assert_first_is_left(self, after: int) -> None:
        """The other one goes on after this timestamp. On a busy machine it may be too late as well, and is
        left too."""
        (begun, *again), second = self.asked()
        self.assertEqual((begun, {*again, *second}), (0, {after}))
        self.assertTrue(second, "the other one was not asked")

    @mock.patch("orthodrome._engine.SILENCE_MAX", 0.2)
    def test_silent_gateway_is_left(self) -> None:
        watch = self.watch()
        self.assertEqual([next(watch).through for _ in range(2)], [1, 2])
        self.assert_first_is_left(1)
        self.assertTrue(self.gateways[0].ended.acquire(timeout=5), "the call goes on")

    def test_gateway_that_does_not_accept_the_watch_is_left(self) -> None:
        self.gateways[0].accepts = False
        self.assertEqual(next(self.watch(attempt_timeout=0.2)).through, 1)
        self.assert_first_is_left(0)

    def test_stopped_gateway_is_left(self) -> None:
        watch = self.watch()
        next(watch)
        self.gateways[0].stop()
        self.assertEqual(next(watch).through, 2)
        self.assertEqual(self.asked(), [[0], [1]])

    def test_close_ends_the_iteration_of_another_thread(self) -> None:
        watch = self.watch()
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(batch.through for batch in watch))
        thread.start()
        while not seen and thread.is_alive():
            # `extend` takes one after the other.
            time.sleep(0.01)
        began = time.monotonic()
        watch.close()
        thread.join(5)
        self.assertFalse(thread.is_alive())
        self.assertLess(time.monotonic() - began, 1)
        self.assertEqual(seen, [1])
        self.assertTrue(self.gateways[0].ended.acquire(timeout=5), "the call goes on")

    def test_closed_client_is_an_error(self) -> None:
        watch = self.watch()
        next(watch)
        timer = threading.Timer(0.1, self.db.close)
        timer.start()
        with self.assertRaises(orthodrome.ClosedError):
            next(watch)
        timer.join()
        with self.assertRaises(orthodrome.ClosedError):
            next(watch)

    def test_dropped_watch_ends_its_call_and_its_thread(self) -> None:
        watch = self.watch()
        next(watch)
        del watch
        gc.collect()
        self.assertTrue(self.gateways[0].ended.acquire(timeout=5), "the call goes on")
        deadline = time.monotonic() + 5
        while any(thread.name == "orthodrome-watch" for thread in threading.enumerate()):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def run_async(self, work: Any, **options: Any) -> None:
        async def main() -> None:
            async with await orthodrome.aio.connect(self.endpoints, **options) as db:
                self.async_db = db
                async with db.watch(KeyRange()) as watch:
                    await work(watch)

        asyncio.run(main())

    def test_asyncio_cancelled_step_loses_nothing(self) -> None:
        go = threading.Event()

        def serve(request: api.WatchRequest) -> Iterator[api.WatchResponse]:
            yield batch(1)
            go.wait(5)
            yield batch(2, changed(b"k", b"v", 2))

        self.gateways[0].serve = serve

        async def work(watch: Any) -> None:
            self.assertEqual((await anext(watch)).through, 1)
            for _ in range(3):
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(watch), 0.02)
            go.set()
            self.assertEqual(await anext(watch), Changes((change(b"k", b"v", 2),), 2))

        self.run_async(work)
        self.assertEqual(self.asked(), [[0], []])
        self.assertTrue(self.gateways[0].ended.acquire(timeout=5), "the call goes on")

    @mock.patch("orthodrome._engine.SILENCE_MAX", 0.2)
    def test_asyncio_silent_gateway_is_left(self) -> None:
        async def work(watch: Any) -> None:
            await anext(watch)
            # Short steps do not hide that the gateway is silent.
            for _ in range(100):
                try:
                    self.assertEqual((await asyncio.wait_for(anext(watch), 0.05)).through, 2)
                    return
                except asyncio.TimeoutError:
                    continue
            self.fail("the watch waits for ever")

        self.run_async(work)
        self.assert_first_is_left(1)

    def test_asyncio_gateway_that_does_not_accept_the_watch_is_left(self) -> None:
        self.gateways[0].accepts = False

        async def work(watch: Any) -> None:
            self.assertEqual((await anext(watch)).through, 1)

        self.run_async(work, attempt_timeout=0.2)
        self.assert_first_is_left(0)

    def test_asyncio_stopped_gateway_is_left(self) -> None:
        async def work(watch: Any) -> None:
            await anext(watch)
            await asyncio.to_thread(self.gateways[0].stop)
            self.assertEqual((await anext(watch)).through, 2)

        self.run_async(work)
        self.assertEqual(self.asked(), [[0], [1]])

    def test_asyncio_close_ends_the_iteration_of_another_task(self) -> None:
        async def work(watch: Any) -> None:
            began = asyncio.Event()

            async def iterate() -> list[int]:
                seen = []
                async for changes in watch:
                    seen.append(changes.through)
                    began.set()
                return seen

            task = asyncio.create_task(iterate())
            await began.wait()
            await asyncio.sleep(0.01)
            await watch.aclose()
            self.assertEqual(await asyncio.wait_for(task, 5), [1])

        self.run_async(work)

    def test_asyncio_closed_client_is_an_error(self) -> None:
        async def work(watch: Any) -> None:
            await anext(watch)
            task = asyncio.create_task(anext(watch))
            await asyncio.sleep(0.01)
            await self.async_db.close()
            with self.assertRaises(orthodrome.ClosedError):
                await asyncio.wait_for(task, 5)

        self.run_async(work)


def renewal_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "orthodrome"]


class KeptLeases(unittest.TestCase):
    """Leases at a gateway that speaks gRPC, kept by a thread or a task."""

    def setUp(self) -> None:
        self.gateway = Gateway()
        self.addCleanup(self.gateway.stop)

    def test_lease_is_renewed_until_it_is_closed(self) -> None:
        with orthodrome.connect(self.gateway.endpoint) as db:
            with db.keep_lease(Gateway.LEASE) as kept:
                kept.wait(1.2)
                self.assertIn(len(self.gateway.calls), (3, 4))
            self.assertEqual(renewal_threads(), [])
            kept.wait()
            calls = len(self.gateway.calls)
            time.sleep(0.5)
            self.assertEqual(len(self.gateway.calls), calls)

    def test_end_of_the_lease_is_noticed(self) -> None:
        with orthodrome.connect(self.gateway.endpoint) as db, db.keep_lease(Gateway.LEASE) as kept:
            self.gateway.lives = False
            with self.assertRaisesRegex(LeaseEndedError, "the lease has ended"):
                kept.wait(5)
            with self.assertRaises(LeaseEndedError):
                kept.check()

    def test_lease_is_taken_for_ended_while_no_gateway_answers(self) -> None:
        with orthodrome.connect(self.gateway.endpoint) as db, db.keep_lease(Gateway.LEASE) as kept:
            began = time.monotonic()
            self.gateway.stop()
            with self.assertRaisesRegex(LeaseEndedError, "not renewed in time: "):
                kept.wait(5)
            self.assertTrue(0.9 < time.monotonic() - began < 2)

    def test_revocation_comes_after_a_pending_renewal(self) -> None:
        with orthodrome.connect(self.gateway.endpoint) as db:
            with db.leased(1):
                self.gateway.delay = 0.4
                time.sleep(0.5)
            self.assertEqual(self.gateway.calls, ["renew", "renew", "revoke"])

    def test_closed_client_ends_the_renewal(self) -> None:
        db = orthodrome.connect(self.gateway.endpoint)
        # The next renewal would be in 10 s.
        kept = db.keep_lease(LEASE)
        began = time.monotonic()
        threading.Timer(0.1, db.close).start()
        kept.wait()
        kept.close()
        self.assertLess(time.monotonic() - began, 5)
        deadline = time.monotonic() + 5
        while renewal_threads():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def run_async(self, work: Any) -> None:
        async def main() -> None:
            async with await orthodrome.aio.connect(self.gateway.endpoint) as db:
                await work(db)

        asyncio.run(main())

    def test_asyncio_lease_is_renewed_until_it_is_closed(self) -> None:
        async def work(db: orthodrome.aio.Client) -> None:
            async with await db.keep_lease(Gateway.LEASE) as kept:
                await kept.wait(1.2)
                self.assertIn(len(self.gateway.calls), (3, 4))
            await kept.wait()
            calls = len(self.gateway.calls)
            await asyncio.sleep(0.5)
            self.assertEqual(len(self.gateway.calls), calls)

        self.run_async(work)

    def test_asyncio_end_of_the_lease_is_noticed(self) -> None:
        async def work(db: orthodrome.aio.Client) -> None:
            async with await db.keep_lease(Gateway.LEASE) as kept:
                waiting = asyncio.create_task(kept.wait())
                self.gateway.lives = False
                with self.assertRaisesRegex(LeaseEndedError, "the lease has ended"):
                    await asyncio.wait_for(waiting, 5)

        self.run_async(work)

    def test_asyncio_revocation_comes_after_a_pending_renewal(self) -> None:
        async def work(db: orthodrome.aio.Client) -> None:
            async with db.leased(1) as kept:
                self.assertEqual(kept.lease, Gateway.LEASE)
                self.gateway.delay = 0.4
                await asyncio.sleep(0.5)
            self.assertEqual(self.gateway.calls, ["renew", "renew", "revoke"])

        self.run_async(work)

    def test_asyncio_lease_of_a_cancelled_block_is_revoked(self) -> None:
        async def work(db: orthodrome.aio.Client) -> None:
            async def hold() -> None:
                async with db.leased(1):
                    await asyncio.sleep(60)

            task = asyncio.create_task(hold())
            await asyncio.sleep(0.2)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual(self.gateway.calls, ["renew", "revoke"])

        self.run_async(work)

    def test_asyncio_closed_client_ends_the_renewal(self) -> None:
        async def work(db: orthodrome.aio.Client) -> None:
            kept = await db.keep_lease(LEASE)
            waiting = asyncio.create_task(kept.wait())
            await asyncio.sleep(0.1)
            await db.close()
            await asyncio.wait_for(waiting, 5)
            await asyncio.wait_for(kept.aclose(), 5)

        self.run_async(work)

    def test_asyncio_client_that_is_closed_at_once_does_not_hold_up_the_end(self) -> None:
        async def work(db: orthodrome.aio.Client) -> None:
            kept = await db.keep_lease(LEASE)
            await db.close()
            await asyncio.wait_for(kept.wait(), 5)
            await asyncio.wait_for(kept.aclose(), 5)

        self.run_async(work)


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
