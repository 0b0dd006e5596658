//! Items of trait implementations that are the same, word for word, in every protocol that commits
//! in two phases. They can be, because these protocols give their types, fields, messages, commands
//! and timers the same names. A protocol names the macro inside its `impl` block, and writes below
//! it only what differs.

/// In `impl Role for Leader`: types, settings, the log, and the handlers of a node that pass each
/// message to the partition that it is for.
macro_rules! role_items {
    ($protocol:ty) => {
        type Protocol = $protocol;
        type Log = Log;
        type State = State;
        type Config = Config;
        type Msg = Msg;
        type Timer = Timer;
        type Note = Note;

        fn hosting(config: &Config) -> &crate::hosting::Config {
            &config.hosting
        }

        fn applied(state: &State) -> crate::replication::Index {
            state.applied
        }

        fn set_applied(state: &mut State, index: crate::replication::Index) {
            state.applied = index;
        }

        fn floor(state: &State) -> orthodrome_core::time::Timestamp {
            state.floor
        }

        fn log_message(partition: PartitionId, message: crate::replication::Message<Log>) -> Msg {
            Msg::Replication { partition, message }
        }

        fn log_timer(partition: PartitionId, timer: crate::replication::Timer) -> Timer {
            Timer::Replication(partition, timer)
        }

        fn not_leader(partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId>) -> Msg {
            Msg::NotLeader { partition, leader, txn }
        }

        fn members(
            partition: PartitionId,
            since: crate::replication::Index,
            voters: Vec<NodeId>,
        ) -> Msg {
            Msg::Members { partition, since, voters }
        }

        fn deliver(server: &mut Server, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
            if let Some(id) = msg.partition() {
                server.on_message(id, from, msg, cx);
            } else if let Msg::Replication { partition, message } = msg {
                server.on_log_message(partition, from, message, cx);
            } else if let Msg::NotLeader { partition, leader, txn } = msg {
                server.on_not_leader(from, partition, leader, txn, cx);
            } else if let Msg::Members { partition, since, voters } = msg {
                server.on_members(partition, since, &voters);
            } else {
                Self::on_node_message(from, msg, cx);
            }
        }

        fn serve(leading: &mut Leading<'_>, from: NodeId, msg: Msg, world: &mut World<'_>) {
            if let Some(led) = msg.led_by_sender() {
                world.routes.learn(led, from, world.cx.now());
            }
            leading.serve(from, msg, world);
        }

        fn on_read_index(
            leading: &mut Leading<'_>,
            id: u64,
            is_leader: bool,
            world: &mut World<'_>,
        ) {
            leading.on_read_index(id, is_leader, world);
        }

        fn on_not_leader(
            leading: &mut Leading<'_>,
            other: PartitionId,
            txn: TxnId,
            world: &mut World<'_>,
        ) {
            leading.on_not_leader(other, txn, world);
        }
    };
}
pub(crate) use role_items;

/// In `impl Coordinator for Leader`.
macro_rules! coordinator_items {
    () => {
        type Vote = Vote;

        fn coordination(&mut self) -> &mut Coordination<Self> {
            &mut self.coordination
        }

        fn settle_command(txns: Vec<TxnId>) -> Command {
            Command::Settle(txns)
        }

        fn acknowledge_command(clients: Vec<(orthodrome_core::ClientId, u64)>) -> Command {
            Command::Acknowledge(clients)
        }

        fn timeouts(config: &Config) -> &crate::commit::Timeouts {
            &config.timeouts
        }
    };
}
pub(crate) use coordinator_items;

/// In `impl Gathering for Leader`, whose participants are known as `$part`.
macro_rules! gathering_items {
    ($part:ty) => {
        type Prepared = Prepared;
        type Part = $part;
        type Request = Request;

        fn coordinate_command(
            txn: TxnId,
            participants: std::sync::Arc<Vec<$part>>,
            acknowledged_below: u64,
        ) -> Command {
            Command::Coordinate { txn, participants, acknowledged_below }
        }

        fn participation(&mut self) -> &mut crate::commit::Participation<Prepared> {
            &mut self.participation
        }

        fn vote(prepared: &Prepared) -> (PartitionId, Vote) {
            (prepared.coordinator, prepared.vote())
        }

        fn refusal(reason: AbortReason) -> Vote {
            Vote::Refused(reason)
        }

        fn committed(timestamp: orthodrome_core::Timestamp) -> Vote {
            Vote::Committed(timestamp)
        }

        fn forget_command(txns: Vec<TxnId>) -> Command {
            Command::Forget(txns)
        }

        fn end(
            leading: &mut Leading<'_>,
            txn: TxnId,
            coordinator: PartitionId,
            verdict: crate::commit::Verdict,
            world: &mut World<'_>,
        ) {
            leading.end(txn, coordinator, verdict, world);
        }
    };
}
pub(crate) use gathering_items;

/// In `impl Gateway for Own`.
macro_rules! gateway_items {
    () => {
        fn timeouts(config: &Config) -> &crate::commit::Timeouts {
            &config.timeouts
        }

        fn resolve_message(open: &Open) -> Msg {
            let (txn, coordinator) = (open.txn.id, open.coordinator);
            let participants = open.participants.keys().copied().collect();
            Msg::Resolve { txn, coordinator, participants }
        }

        fn read_only_message(
            txn: TxnId,
            partition: PartitionId,
            keys: Vec<Key>,
            at_least: Timestamp,
        ) -> Msg {
            Msg::ReadOnly { txn, partition, keys, at_least }
        }

        fn on_message(client: &mut Client, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
            client.on_message(from, msg, cx);
        }
    };
}
pub(crate) use gateway_items;

/// Beside the types `Note` and `Timer` of a protocol: those of the core and of hosting become its
/// own, with the same names.
macro_rules! core_events {
    () => {
        impl From<crate::hosting::Note> for Note {
            fn from(note: crate::hosting::Note) -> Self {
                Self::Hosting(note)
            }
        }

        impl From<crate::commit::Note> for Note {
            fn from(note: crate::commit::Note) -> Self {
                match note {
                    crate::commit::Note::QueryAborted => Self::QueryAborted,
                    crate::commit::Note::Abandoned => Self::Abandoned,
                    crate::commit::Note::CoordinatorTakeover => Self::CoordinatorTakeover,
                    crate::commit::Note::Resolved => Self::Resolved,
                    crate::commit::Note::Forgotten => Self::Forgotten,
                    crate::commit::Note::CommitWait => Self::CommitWait,
                    crate::commit::Note::StaleVersions => Self::StaleVersions,
                    crate::commit::Note::SecondRound => Self::SecondRound,
                    crate::commit::Note::Resent => Self::Resent,
                    crate::commit::Note::AttemptSuperseded => Self::AttemptSuperseded,
                    crate::commit::Note::Tombstone => Self::Tombstone,
                }
            }
        }

        impl From<crate::commit::Timer> for Timer {
            fn from(timer: crate::commit::Timer) -> Self {
                match timer {
                    crate::commit::Timer::CommitWait(partition) => Self::CommitWait(partition),
                    crate::commit::Timer::Resend(txn) => Self::Resend(txn),
                    crate::commit::Timer::Heartbeat => Self::Heartbeat,
                }
            }
        }
    };
}
pub(crate) use core_events;

/// Beside the type `Msg` of a protocol: the messages of the core become its own. `QueryPrepare` has
/// the participant, of type `$part`, in its field `$field`.
macro_rules! core_messages {
    ($part:ty, $field:ident) => {
        impl From<crate::commit::ToCoordinator<Vote>> for Msg {
            fn from(msg: crate::commit::ToCoordinator<Vote>) -> Self {
                use crate::commit::ToCoordinator::{Ack, MayForget, QueryDecision, Vote};
                match msg {
                    Vote { txn, coordinator, partition, vote } => {
                        Self::PrepareResult { txn, coordinator, partition, vote }
                    }
                    QueryDecision { txn, coordinator, partition, vote } => {
                        Self::QueryDecision { txn, coordinator, partition, vote }
                    }
                    Ack { txn, coordinator, partition } => {
                        Self::WritebackAck { txn, coordinator, partition }
                    }
                    MayForget { coordinator, partition, txns } => {
                        Self::MayForget { coordinator, partition, txns }
                    }
                }
            }
        }

        impl From<crate::commit::ToParticipant<$part>> for Msg {
            fn from(msg: crate::commit::ToParticipant<$part>) -> Self {
                use crate::commit::ToParticipant::{Forget, QueryPrepare};
                match msg {
                    QueryPrepare { txn, participant, coordinator } => {
                        Self::QueryPrepare { txn, $field: participant, coordinator }
                    }
                    Forget { partition, coordinator, txns } => {
                        Self::Forget { partition, coordinator, txns }
                    }
                }
            }
        }
    };
}
pub(crate) use core_messages;
