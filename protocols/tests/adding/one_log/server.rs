//! The server side: the state that the log gives, and how the group's leader serves.

use std::convert::Infallible;
use std::fmt;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::machine::{Claim, Leak, Message as _};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};
use orthodrome_protocols::hosting::{self, Context, Divisible, Role};
use orthodrome_protocols::replication::{self, Index};

use super::message::{Command, Log, Msg, Request};
use super::{Config, GROUP, Note, OneLog, Timer};

/// One server node.
pub type Server = hosting::Server<Leader>;
type Partition = hosting::Partition<Leader>;
type Leading<'a> = hosting::Leading<'a, Leader>;
type World<'a> = hosting::World<'a, Leader>;

/// What every replica knows beside the data.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct State {
    /// The last entry applied.
    applied: Index,
    /// Outcomes that clients have not acknowledged.
    outcomes: OrdMap<TxnId, Outcome>,
    /// Clients know the outcomes of their transactions below these counters.
    acknowledged: OrdMap<ClientId, u64>,
}

impl State {
    /// What became of a transaction, if anything has: unknown if that was forgotten.
    fn outcome(&self, txn: TxnId) -> Option<Outcome> {
        let below = self.acknowledged.get(&txn.client).copied().unwrap_or_default();
        let forgotten = (txn.counter < below).then_some(Outcome::Unknown);
        self.outcomes.get(&txn).copied().or(forgotten)
    }

    /// Applies an entry. The same entries give the same state and the same outcomes everywhere,
    /// whatever the store holds: a snapshot's data may be newer than its state.
    fn apply(&mut self, command: &Command, config: &Config, store: &mut Store) -> Outcome {
        let txn = command.txn;
        let known = self.outcome(txn).filter(|_| config.mutation != Some("R6"));
        if let Some(known) = known.filter(|_| !command.is_read_only) {
            return known;
        }
        let below = self.acknowledged.entry(txn.client).or_default();
        *below = command.acknowledged_below.max(*below);
        let above = TxnId::new(txn.client, *below);
        self.outcomes.retain(|id, _| id.client != txn.client || *id >= above);
        let timestamp = Timestamp(self.applied.0);
        let outcome = match &command.writes {
            Some(_) => Outcome::Committed(timestamp),
            None => Outcome::Aborted(command.reason),
        };
        for (key, value) in command.writes.iter().flatten() {
            store.put(GROUP, key.clone(), Version { timestamp, writer: txn }, value.clone());
        }
        if !command.is_read_only {
            self.outcomes.insert(txn, outcome);
        }
        outcome
    }
}

impl Divisible for State {
    fn divide(self, bytes_max: usize) -> Vec<Self> {
        let first = Self { applied: self.applied, ..Self::default() };
        let mut parts = Pieces::new(first, bytes_max);
        for (txn, outcome) in self.outcomes {
            parts.of(32).outcomes.insert(txn, outcome);
        }
        for (client, below) in self.acknowledged {
            parts.of(16).acknowledged.insert(client, below);
        }
        parts.finish()
    }

    fn join(&mut self, part: Self) {
        self.outcomes.extend(part.outcomes);
        self.acknowledged.extend(part.acknowledged);
    }
}

/// What only the leader knows: who waits for which entry to be chosen, and what those entries
/// write.
#[derive(Debug, Default)]
pub struct Leader {
    waiting: OrdMap<(TxnId, Time), Vec<NodeId>>,
    pending: OrdSet<Key>,
}

/// Decides about a transaction and appends it, or answers if it is in the log already.
fn append(
    leading: &mut Leading<'_>,
    from: NodeId,
    (txn, asked): (TxnId, Time),
    request: Option<Request>,
    world: &mut World<'_>,
) {
    let known = leading.state.outcome(txn).filter(|_| world.config.mutation != Some("R6"));
    let is_read_only = request.as_ref().is_some_and(|request| request.is_read_only);
    if let Some(outcome) = known.filter(|_| !is_read_only) {
        world.cx.note(Note::Repeated);
        world.send(from, Msg::Ended { txn, asked, outcome });
        return;
    }
    let waiting = leading.leader.waiting.entry((txn, asked)).or_default();
    waiting.push(from);
    if waiting.len() > 1 {
        return;
    }
    let acknowledged_below = request.as_ref().map_or(0, |request| request.acknowledged_below);
    let decided = match request {
        Some(request) => validate(&leading.leader.pending, request, world),
        None => {
            world.cx.note(Note::Refused);
            Err(AbortReason::Recovery)
        }
    };
    let reason = decided.as_ref().err().copied().unwrap_or(AbortReason::Conflict);
    let writes = decided.ok();
    leading.leader.pending.extend(writes.iter().flatten().map(|(key, _)| key.clone()));
    let command = Command { txn, asked, writes, reason, is_read_only, acknowledged_below };
    leading.propose(command, world);
}

/// What a transaction writes, if everything that it read is the newest: all entries before its own
/// are applied here, or pending.
fn validate(
    pending: &OrdSet<Key>,
    request: Request,
    world: &World<'_>,
) -> Result<Writes, AbortReason> {
    let Request { seen, writes, .. } = request;
    if world.config.mutation == Some("R3") {
        return Ok(writes);
    }
    if seen.iter().map(|(key, _)| key).chain(writes.keys()).any(|key| pending.contains(key)) {
        return Err(AbortReason::Conflict);
    }
    let is_newest = |(key, seen): &(Key, Version)| world.store.read(GROUP, key).version == *seen;
    if seen.iter().all(is_newest) { Ok(writes) } else { Err(AbortReason::StaleRead) }
}

impl Role for Leader {
    type Protocol = OneLog;
    type Log = Log;
    type State = State;
    type Own = ();
    type OwnRecord = Infallible;
    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Note = Note;

    fn hosting(config: &Config) -> &hosting::Config {
        &config.hosting
    }

    fn applied(state: &State) -> Index {
        state.applied
    }

    fn set_applied(state: &mut State, index: Index) {
        state.applied = index;
    }

    fn log_message(partition: PartitionId, message: replication::Message<Log>) -> Msg {
        Msg::Log { partition, message }
    }

    fn log_timer(partition: PartitionId, timer: replication::Timer) -> Timer {
        Timer::Log(partition, timer)
    }

    fn not_leader(partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId>) -> Msg {
        Msg::NotLeader { partition, leader, txn }
    }

    fn members(partition: PartitionId, since: Index, voters: Vec<NodeId>) -> Msg {
        Msg::Members { partition, since, voters }
    }

    fn deliver(
        server: &mut hosting::Server<Self>,
        from: NodeId,
        msg: Msg,
        cx: &mut Context<'_, Self>,
    ) {
        match msg {
            Msg::Read { .. } | Msg::Commit { .. } | Msg::Resolve { .. } => {
                server.on_message(GROUP, from, msg, cx);
            }
            Msg::Log { partition, message } => server.on_log_message(partition, from, message, cx),
            Msg::NotLeader { .. } => {}
            Msg::Members { partition, since, voters } => {
                server.on_members(partition, since, &voters);
            }
            Msg::Values { .. } | Msg::Ended { .. } => unreachable!("{} is an answer", msg.kind()),
        }
    }

    fn on_timer(server: &mut hosting::Server<Self>, timer: Timer, cx: &mut Context<'_, Self>) {
        match timer {
            Timer::Log(partition, timer) => server.on_log_timer(partition, timer, cx),
            Timer::Resend(_) => unreachable!("a gateway's timer at a server"),
        }
    }

    fn serve(leading: &mut Leading<'_>, from: NodeId, msg: Msg, world: &mut World<'_>) {
        match msg {
            Msg::Read { txn, keys } => {
                let is_too_much = world.is_too_much(GROUP, &keys);
                let read = |key| {
                    let read = world.store.read(GROUP, &key);
                    (key, read)
                };
                let reads = (!is_too_much).then(|| keys.into_iter().map(read).collect());
                world.send(from, Msg::Values { txn, reads });
            }
            Msg::Commit { txn, asked, request } => {
                append(leading, from, (txn, asked), Some(request), world);
            }
            Msg::Resolve { txn, asked } => {
                append(leading, from, (txn, asked), None, world);
            }
            Msg::Values { .. }
            | Msg::Ended { .. }
            | Msg::NotLeader { .. }
            | Msg::Members { .. }
            | Msg::Log { .. } => unreachable!("{} is not for a leader", msg.kind()),
        }
    }

    fn on_chosen(partition: &mut Partition, command: &Command, world: &mut World<'_>) {
        let outcome = partition.state.apply(command, world.config, world.store);
        let (txn, asked) = (command.txn, command.asked);
        world.came_to(&outcome);
        if outcome != Outcome::Unknown && !command.is_read_only {
            world.cx.claim(Claim::Decided { txn, outcome });
        }
        if let Some(leader) = &mut partition.leader {
            for key in command.writes.iter().flatten().map(|(key, _)| key) {
                leader.pending.remove(key);
            }
            for to in leader.waiting.remove(&(txn, asked)).into_iter().flatten() {
                world.send(to, Msg::Ended { txn, asked, outcome });
            }
        }
    }

    fn on_leading(partition: &mut Partition, _: &mut World<'_>) {
        partition.leader = Some(Self::default());
    }

    fn on_deposed(_: &mut Partition, _: &mut World<'_>) {}

    fn on_read_index(_: &mut Leading<'_>, _: u64, _: bool, _: &mut World<'_>) {
        unreachable!("no leader asks whether it still leads");
    }

    fn on_not_leader(_: &mut Leading<'_>, _: PartitionId, _: TxnId, _: &mut World<'_>) {}

    fn describe(partition: &Partition, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcomes = &partition.state.outcomes;
        if outcomes.is_empty() { Ok(()) } else { write!(f, " outcomes {:?}", outcomes.keys()) }
    }

    fn assert_invariants(_: &Partition) {}

    fn leaks(&self, _: &State) -> Vec<Leak> {
        vec![("gateways that wait", self.waiting.len()), ("pending keys", self.pending.len())]
    }
}
