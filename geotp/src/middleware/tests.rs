use orthodrome_core::rng::Rng;
use orthodrome_core::txn::Outcome;

use super::*;
use crate::contract::Wait;

/// A workload without data: tests distinguish failures by their reasons only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bare;

impl Work for Bare {
    type Statement = ();
    type Answer = ();
    type Fault = ();
}

const NEAR: NodeId = NodeId(1001);
const FAR: NodeId = NodeId(1002);

struct Rig {
    middleware: Middleware<Bare>,
    rng: Rng,
    now: Time,
    /// Messages that the last step sent.
    sent: Vec<(NodeId, ToAgent<Bare>)>,
    /// The transactions that the last step reported as committed.
    committed: Vec<Xid>,
}

impl Rig {
    /// Runs one step, and returns the reasons that sessions learn for the end of their
    /// transactions.
    fn step(
        &mut self,
        act: impl FnOnce(&mut Middleware<Bare>, &mut Io<'_, Effect<Bare>>),
    ) -> Vec<Reason> {
        let mut effects = Vec::new();
        let Self { middleware, rng, now, sent, committed } = self;
        let mut io = Io { now: *now, clock: Timestamp::ZERO, rng, effects: &mut effects };
        act(middleware, &mut io);
        middleware.assert_invariants();
        sent.clear();
        committed.clear();
        let told = |effect| {
            if let Effect::Send { to, msg } = effect {
                sent.push((to, msg));
                return None;
            }
            let Effect::Finished { xid, outcome, failure, .. } = effect else { return None };
            if matches!(outcome, Outcome::Committed(_)) {
                committed.push(xid);
            }
            failure.map(|(_, failure)| failure.reason)
        };
        effects.into_iter().filter_map(told).collect()
    }

    fn hear(&mut self, from: NodeId, msg: FromAgent<Bare>) -> Vec<Reason> {
        self.step(|middleware, io| middleware.on_message(from, msg, io))
    }
}

/// The fence of both sources.
const FENCE: Fence = Fence { agent: 1, source: 1 };

fn part() -> Part<Bare> {
    Part { statements: vec![()], records: Vec::new(), writes: true }
}

/// A middleware with two sources.
fn rig() -> Rig {
    let millis = Duration::from_millis;
    let config = Config {
        sources: [(NEAR, Kind::Postgres), (FAR, Kind::MariaDb)].into(),
        optimizations: Optimizations { decentralized_prepare: true, ..Optimizations::default() },
        commit: Commit::TwoPhase,
        inner_below: None,
        commit_in_text: true,
        answers_at_decision: true,
        ping_interval: millis(100),
        rtt_weight_percent: 10,
        hot_records: 10,
        hot_keep_percent: 80,
        forecast_percent: 25,
        forecast_max: millis(10),
        admission_wait: millis(10),
        admission_tries: 10,
        resend_after: millis(500),
        give_up_after: millis(5_000),
        scan_interval: millis(1_000),
        finds_deadlocks: true,
        quarantine: millis(1_000),
        checkpoint_records: 100,
        mutations: Mutations::default(),
    };
    let (mut rng, now) = (Rng::stream(1, "test", 1), Time::ZERO);
    let mut effects = Vec::new();
    let mut io = Io { now, clock: Timestamp::ZERO, rng: &mut rng, effects: &mut effects };
    let middleware = Middleware::new(NodeId(1), config, Vec::new(), &mut io);
    let mut rig = Rig { middleware, rng, now, sent: Vec::new(), committed: Vec::new() };
    rig.step(|middleware, io| middleware.on_durable(Ticket(1), io));
    for source in [NEAR, FAR] {
        rig.hear(source, FromAgent::Attached { epoch: 1, fence: FENCE });
    }
    rig
}

impl Rig {
    /// Begins a transaction of a session with statements at these sources.
    fn begin(&mut self, session: u64, sources: &[NodeId], last: Last) -> Xid {
        let mut xid = None;
        self.step(|middleware, io| {
            let begun = middleware.begin(None, Isolation::Serializable, io);
            middleware.follow(begun, SessionId(session));
            let parts = sources.iter().map(|source| (*source, part())).collect();
            middleware.round(begun, parts, last, io);
            xid = Some(begun);
        });
        xid.unwrap()
    }

    fn answered(&mut self, from: NodeId, xid: Xid, round: u32) {
        let (answers, took) = (vec![()], Duration::ZERO);
        self.hear(from, FromAgent::Answered { xid, round, answers, fence: FENCE, took });
    }

    fn prepared(&mut self, from: NodeId, xid: Xid) {
        let (wrote, floor) = (true, Timestamp::ZERO);
        self.hear(from, FromAgent::Prepared { xid, fence: FENCE, wrote, floor });
    }

    /// Makes all persisted records durable.
    fn durable(&mut self) {
        self.step(|middleware, io| middleware.on_durable(Ticket(1_000), io));
    }
}

/// A transaction with pending statements at two sources.
fn under_way() -> (Rig, Xid) {
    let mut rig = rig();
    let xid = rig.begin(0, &[NEAR, FAR], Last::Commit);
    (rig, xid)
}

fn failed(xid: Xid, reason: Reason) -> FromAgent<Bare> {
    FromAgent::Failed { xid, failure: reason.into() }
}

#[test]
fn a_session_is_told_the_cause_and_not_what_came_of_it() {
    for consequence in [Reason::Peer, Reason::Ended] {
        let (mut rig, xid) = under_way();
        assert_eq!(rig.hear(FAR, failed(xid, consequence)), []);
        assert_eq!(rig.hear(NEAR, failed(xid, Reason::Statement)), [Reason::Statement]);
        // The branch reports the cause again: the session is not answered again.
        assert_eq!(rig.hear(NEAR, failed(xid, Reason::Statement)), []);
    }
}

/// A deadlock whose waits arrive in two messages of one look is detected, in either order, when the
/// last one has come; one with a wait of an earlier look is not.
#[test]
fn waits_of_one_look_add_up_and_those_of_an_earlier_one_are_forgotten() {
    let one = |more: [bool; 2]| ((3, more[0]), (3, more[1]));
    for (looks, is_found) in [
        (one([true, false]), [false, true]),
        (one([false, true]), [false, true]),
        (one([true, true]), [false, false]),
        (((3, false), (4, false)), [false, false]),
        (((4, false), (3, false)), [false, false]),
    ] {
        let (mut rig, xid) = under_way();
        let other = Xid { middleware: NodeId(0), ..xid };
        let (first, second) = looks;
        let mut hear = |(look, more), waiter, holder| {
            let waits = vec![Wait { waiter, holder }];
            !rig.hear(NEAR, FromAgent::Waits { look, waits, more }).is_empty()
        };
        let told = [hear(first, xid, other), hear(second, other, xid)];
        assert_eq!(told, is_found, "{looks:?}");
    }
}

#[test]
fn a_cause_is_told_at_once() {
    let (mut rig, xid) = under_way();
    assert_eq!(rig.hear(NEAR, failed(xid, Reason::Statement)), [Reason::Statement]);
    assert_eq!(rig.hear(FAR, failed(xid, Reason::Peer)), []);
}

#[test]
fn a_session_does_not_wait_for_a_cause_that_nobody_says() {
    let (mut rig, xid) = under_way();
    assert_eq!(rig.hear(FAR, failed(xid, Reason::Peer)), []);
    assert_eq!(rig.hear(NEAR, FromAgent::RolledBack { xid }), [Reason::Peer]);
    let (mut rig, xid) = under_way();
    assert_eq!(rig.hear(FAR, failed(xid, Reason::Peer)), []);
    let told = rig.step(|middleware, io| middleware.on_timer(Timer::Resend(xid), io));
    assert_eq!(told, [Reason::Peer]);
    assert_eq!(rig.hear(NEAR, FromAgent::RolledBack { xid }), []);
}

/// The first statements of a session's next transaction name what the source must have committed before.
#[test]
fn statements_follow_the_commits_of_their_own_session() {
    let (mut rig, first) = under_way();
    for source in [NEAR, FAR] {
        rig.answered(source, first, 0);
        rig.prepared(source, first);
    }
    rig.durable();
    assert_eq!(rig.committed, [first]);
    let earlier_of = |rig: &Rig, source: NodeId| {
        let (_, msg) = rig.sent.iter().find(|(to, _)| *to == source).unwrap();
        if let ToAgent::After { earlier, .. } = msg { earlier.clone() } else { Vec::new() }
    };
    rig.begin(1, &[NEAR], Last::Commit);
    assert_eq!(earlier_of(&rig, NEAR), [], "of another session");
    let second = rig.begin(0, &[NEAR], Last::No);
    assert_eq!(earlier_of(&rig, NEAR), [first]);
    rig.answered(NEAR, second, 0);
    rig.step(|middleware, io| {
        middleware.round(second, [(NEAR, part())].into(), Last::No, io);
    });
    assert_eq!(earlier_of(&rig, NEAR), [], "its first statements have waited");
    rig.hear(NEAR, FromAgent::Committed { xid: first, at: Timestamp::ZERO });
    rig.begin(0, &[NEAR, FAR], Last::Commit);
    assert_eq!(earlier_of(&rig, NEAR), []);
    assert_eq!(earlier_of(&rig, FAR), [first]);
    rig.hear(FAR, FromAgent::Committed { xid: first, at: Timestamp::ZERO });
    rig.begin(0, &[FAR], Last::Commit);
    assert_eq!(earlier_of(&rig, FAR), []);
}

#[test]
fn a_branch_whose_only_statement_failed_does_not_stop_a_commit() {
    let mut rig = rig();
    let xid = rig.begin(0, &[FAR], Last::No);
    let failure = Reason::Statement.into();
    rig.hear(FAR, FromAgent::StatementFailed { xid, round: 0, statement: 0, failure });
    rig.step(|middleware, io| middleware.round(xid, [(NEAR, part())].into(), Last::No, io));
    rig.answered(NEAR, xid, 0);
    let told = rig.step(|middleware, io| middleware.commit(xid, io));
    assert_eq!(told, []);
    rig.prepared(NEAR, xid);
    rig.prepared(FAR, xid);
    rig.durable();
    assert_eq!(rig.committed, [xid]);
}

#[test]
fn a_long_statement_is_waited_for_while_its_source_answers() {
    for (sources, is_answering) in
        [(&[NEAR][..], true), (&[NEAR, FAR], true), (&[NEAR], false), (&[NEAR, FAR], false)]
    {
        let mut rig = rig();
        let xid = rig.begin(0, sources, Last::Commit);
        let mut told = Vec::new();
        for _ in 0..20 {
            let sent = rig.now;
            rig.now = rig.now + Duration::from_millis(500);
            if is_answering {
                for source in [NEAR, FAR] {
                    rig.hear(source, FromAgent::Pong { sent, fence: FENCE, is_attached: true });
                }
            }
            told.extend(rig.step(|middleware, io| middleware.on_timer(Timer::Resend(xid), io)));
            let is_open = rig.middleware.open.contains_key(&xid);
            if !is_open {
                break;
            }
        }
        assert_eq!(rig.middleware.open.contains_key(&xid), is_answering, "{sources:?}");
    }
}

/// Answers to pings wait behind a long answer on the same connection.
#[test]
fn a_source_whose_long_answer_is_arriving_is_neither_asked_again_nor_given_up() {
    for is_arriving in [true, false] {
        let mut rig = rig();
        let xid = rig.begin(0, &[FAR], Last::Commit);
        let mut asks = 0;
        for _ in 0..20 {
            rig.now = rig.now + Duration::from_millis(499);
            if is_arriving {
                rig.middleware.on_arriving(FAR, rig.now);
            }
            rig.now = rig.now + Duration::from_millis(1);
            rig.step(|middleware, io| middleware.on_timer(Timer::Resend(xid), io));
            if !rig.middleware.open.contains_key(&xid) {
                break;
            }
            asks += rig.sent.len();
        }
        assert_eq!(rig.middleware.open.contains_key(&xid), is_arriving);
        assert_eq!(asks == 0, is_arriving, "{asks}");
    }
}

/// On a slow link the answers to pings are old when they arrive. Each counts the votes of all
/// transactions that wait, and none of them may ask for more than one further answer.
#[test]
fn transactions_that_wait_for_a_fence_ask_for_it_once() {
    let mut rig = rig();
    for _ in 0..5 {
        let xid = rig.begin(0, &[NEAR, FAR], Last::Commit);
        for source in [NEAR, FAR] {
            rig.answered(source, xid, 0);
        }
        rig.now = rig.now + Duration::from_secs(1);
        for source in [NEAR, FAR] {
            rig.prepared(source, xid);
        }
    }
    let pong = |sent| FromAgent::Pong { sent, fence: FENCE, is_attached: true };
    for _ in 0..5 {
        let sent = rig.now;
        // Only a source that forgets locks is asked.
        rig.now = rig.now + Duration::from_secs(2);
        rig.hear(FAR, pong(sent));
        let pings = rig.sent.iter().filter(|(_, msg)| matches!(msg, ToAgent::Ping { .. })).count();
        assert_eq!(pings, 1);
        // It is on its way, and the answer to a ping at an interval arrives before.
        rig.hear(FAR, pong(sent));
        assert_eq!(rig.sent, []);
    }
    assert_eq!(rig.committed, []);
    let sent = rig.now;
    rig.now = rig.now + Duration::from_millis(1);
    rig.hear(FAR, pong(sent));
    rig.durable();
    assert_eq!(rig.committed.len(), 5);
}
