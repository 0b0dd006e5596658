use orthodrome_core::rng::Rng;

use super::*;
use crate::contract::Wait;

/// Everything that can be told apart is in the reasons.
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
}

impl Rig {
    /// Runs one step, and returns the reasons that sessions learn for the end of their
    /// transactions.
    fn step(
        &mut self,
        act: impl FnOnce(&mut Middleware<Bare>, &mut Io<'_, Effect<Bare>>),
    ) -> Vec<Reason> {
        let mut effects = Vec::new();
        let Self { middleware, rng, now } = self;
        let mut io = Io { now: *now, clock: Timestamp::ZERO, rng, effects: &mut effects };
        act(middleware, &mut io);
        middleware.assert_invariants();
        let told = |effect| {
            let Effect::Finished { failure, .. } = effect else { return None };
            failure.map(|(_, failure)| failure.reason)
        };
        effects.into_iter().filter_map(told).collect()
    }

    fn hear(&mut self, from: NodeId, msg: FromAgent<Bare>) -> Vec<Reason> {
        self.step(|middleware, io| middleware.on_message(from, msg, io))
    }
}

/// A transaction whose statements are under way at two sources.
fn under_way() -> (Rig, Xid) {
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
    let mut rig = Rig { middleware, rng, now };
    rig.step(|middleware, io| middleware.on_durable(Ticket(1), io));
    for source in [NEAR, FAR] {
        let fence = Fence { agent: 1, source: 1 };
        rig.hear(source, FromAgent::Attached { epoch: 1, fence });
    }
    let part = || Part { statements: vec![()], records: Vec::new(), writes: true };
    let mut xid = None;
    rig.step(|middleware, io| {
        let begun = middleware.begin(None, Isolation::Serializable, io);
        let parts = [(NEAR, part()), (FAR, part())].into();
        middleware.round(begun, parts, Last::Commit, io);
        xid = Some(begun);
    });
    (rig, xid.unwrap())
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

/// A deadlock whose ends came in two messages is seen; one that an earlier look saw is not.
#[test]
fn waits_of_one_look_add_up_and_those_of_an_earlier_one_are_forgotten() {
    for (looks, is_found) in [([3, 3], true), ([3, 4], false), ([4, 3], false)] {
        let (mut rig, xid) = under_way();
        let other = Xid { middleware: NodeId(0), ..xid };
        let [first, second] = looks;
        let wait = |waiter, holder| vec![Wait { waiter, holder }];
        let told = rig.hear(NEAR, FromAgent::Waits { look: first, waits: wait(xid, other) });
        assert_eq!(told, []);
        let told = rig.hear(NEAR, FromAgent::Waits { look: second, waits: wait(other, xid) });
        assert_eq!(told.is_empty(), !is_found, "{looks:?}");
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
