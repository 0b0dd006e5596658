//! What a node says to another one within one step travels as one message. A server has replicas of
//! many partitions, so one transaction often has several messages from one node to another: a
//! message costs processor time whatever is in it, and the transaction need not be sent twice. What
//! nobody waits for also travels with what is said in later steps.

use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::{Cx, Lane, Message as _};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Time, nanos};

use super::members::Members;
use super::message::{Inner, Msg, Plain};
use super::per_second::PerSecond;
use super::{Config, Geodesic, Timer};

/// Messages together have at most so many bytes: a few packets, because a message is lost with any of
/// its packets.
const TOGETHER_BYTES_MAX: usize = 4_096;

/// Messages of the current step to other nodes.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The members of partitions whose members have changed, as far as this node knows. Messages to
    /// their replicas say so.
    pub members: OrdMap<PartitionId, Arc<Members>>,
    /// By receiver, in the order of the first message to each.
    by_node: Vec<(NodeId, Vec<Msg>)>,
    /// By receiver: less than one message each.
    late: OrdMap<NodeId, Late>,
    /// When the timer for late messages expires.
    late_due: Option<Time>,
}

/// What nobody waits for, and how much is sent to the same node.
#[derive(Debug, Default)]
struct Late {
    /// Messages to this node.
    sent: PerSecond,
    /// Kept back since then.
    waiting: Vec<(Time, Msg)>,
    /// Their size. Once it is that of a message, they are sent.
    bytes: usize,
}

impl Late {
    fn keep(&mut self, msgs: Vec<Msg>, now: Time) {
        self.bytes += msgs.iter().map(|msg| msg.size()).sum::<usize>();
        self.waiting.extend(msgs.into_iter().map(|msg| (now, msg)));
    }

    /// What was kept back, each with for how long.
    fn take(&mut self, now: Time) -> Vec<Msg> {
        self.bytes = 0;
        let told = |(since, mut msg): (Time, Msg)| {
            if let Msg::Applied { late, .. } = &mut msg {
                *late = nanos(now.since(since));
            }
            msg
        };
        self.waiting.drain(..).map(told).collect()
    }
}

/// Whether nobody waits for a message: what a coordinator may forget matters once in a while.
fn is_late(msg: &Msg) -> bool {
    matches!(msg, Msg::Applied { .. })
}

impl Outbox {
    /// Adds a message.
    pub(super) fn push(&mut self, to: NodeId, msg: Msg) {
        let msg = self.with_members(msg);
        let Some((_, waiting)) = self.by_node.iter_mut().find(|(node, _)| *node == to) else {
            self.by_node.push((to, vec![msg]));
            return;
        };
        let rest = match waiting.last_mut() {
            Some(last) => join(last, msg),
            None => Some(msg),
        };
        waiting.extend(rest);
    }

    /// The message, with the members of the partition whose replica is to get it. Control messages are
    /// about gateways, whoever the members are.
    pub(super) fn with_members(&self, msg: Msg) -> Msg {
        if msg.lane() == Lane::Control {
            return msg;
        }
        let moved = msg.partition().and_then(|id| Some((id, self.members.get(&id)?)));
        let Some((partition, members)) = moved else { return msg };
        let (members, msg) = (members.clone(), Box::new(Plain(msg)));
        Msg::Under { partition, members, msg }
    }

    /// Sends everything; if much is sent to a node, what nobody waits for only with other messages, or
    /// once it is enough for a message of its own. Control messages go alone: they have a lane of their
    /// own.
    pub(super) fn send(&mut self, config: &Config, cx: &mut Cx<'_, Geodesic>) {
        let (now, bytes_max) = (cx.now(), config.piece_bytes.min(TOGETHER_BYTES_MAX));
        for (to, waiting) in self.by_node.drain(..) {
            let late = self.late.entry(to).or_default();
            late.sent.add(u32::try_from(waiting.len()).unwrap_or(u32::MAX), now);
            let is_busy = late.sent.most() > config.late_from;
            let all = if is_busy && waiting.iter().all(is_late) {
                late.keep(waiting, now);
                if late.bytes < bytes_max {
                    if self.late_due.is_none() {
                        self.late_due = Some(now + config.late_max);
                        cx.set_timer(Timer::Late, now + config.late_max);
                    }
                    continue;
                }
                late.take(now)
            } else {
                let mut all = late.take(now);
                all.extend(waiting);
                all
            };
            for msg in together(all, bytes_max) {
                cx.send(to, msg);
            }
        }
    }

    /// Sends what was kept back, also alone.
    pub(super) fn send_late(&mut self, config: &Config, cx: &mut Cx<'_, Geodesic>) {
        self.late_due = None;
        let (now, bytes_max) = (cx.now(), config.piece_bytes.min(TOGETHER_BYTES_MAX));
        for (&to, late) in &mut self.late {
            for msg in together(late.take(now), bytes_max) {
                cx.send(to, msg);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_node.is_empty()
    }
}

/// The messages to send for these to one node.
fn together(waiting: Vec<Msg>, bytes_max: usize) -> Vec<Msg> {
    if waiting.len() <= 1 {
        return waiting;
    }
    let (mut sent, mut parts, mut bytes) = (Vec::new(), Vec::new(), 0);
    for msg in waiting {
        if msg.lane() == Lane::Control {
            sent.push(msg);
            continue;
        }
        let size = msg.size();
        if bytes + size > bytes_max {
            sent.extend(one(std::mem::take(&mut parts)));
            bytes = 0;
        }
        bytes += size;
        parts.push(Inner(msg));
    }
    sent.extend(one(parts));
    sent
}

/// One message for these parts.
fn one(mut parts: Vec<Inner>) -> Option<Msg> {
    if parts.len() > 1 {
        return Some(Msg::Several(parts));
    }
    parts.pop().map(|Inner(msg)| msg)
}

/// Adds `msg` to `last` if both say the same of one transaction to different partitions. Otherwise
/// returns it.
fn join(last: &mut Msg, msg: Msg) -> Option<Msg> {
    match (last, msg) {
        (Msg::Begin { more, text, .. }, Msg::Begin { partition, text: same, more: rest })
            if Arc::ptr_eq(text, &same) =>
        {
            more.push(partition);
            more.extend(rest);
            None
        }
        (
            Msg::Forward { more, text, .. },
            Msg::Forward { partition, text: same, stamp, more: rest },
        ) if Arc::ptr_eq(text, &same) => {
            more.push((partition, stamp));
            more.extend(rest);
            None
        }
        (
            Msg::Apply { txn, more, output, .. },
            Msg::Apply { txn: same, partition, output: same_output, more: rest, .. },
        ) if *txn == same && Arc::ptr_eq(output, &same_output) => {
            more.push(partition);
            more.extend(rest);
            None
        }
        (_, msg) => Some(msg),
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::{ClientId, TxnId};
    use orthodrome_core::time::Timestamp;
    use orthodrome_core::txn::{Outcome, Writes};
    use orthodrome_core::wire::{decode, encode};

    use super::super::message::Output;
    use super::*;

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    fn ack(counter: u64) -> Msg {
        let (partition, at) = (PartitionId(0), Timestamp(7));
        Msg::Ack { txn: txn(counter), partition, stamp: at, arrived: at }
    }

    #[test]
    fn what_says_the_same_to_several_partitions_is_one_message() {
        let outcome = Outcome::Committed(Timestamp(5));
        let output = Arc::new(Output { outcome, writes: Writes::new() });
        let apply = |counter, partition, output: &Arc<Output>| Msg::Apply {
            txn: txn(counter),
            partition: PartitionId(partition),
            output: output.clone(),
            participants: vec![PartitionId(0), PartitionId(1)],
            more: vec![],
        };
        let mut outbox = Outbox::default();
        outbox.push(NodeId(2), apply(1, 0, &output));
        outbox.push(NodeId(3), apply(1, 0, &output));
        outbox.push(NodeId(2), apply(1, 1, &output));
        outbox.push(NodeId(2), apply(2, 1, &output));
        let [(NodeId(2), first), (NodeId(3), second)] = outbox.by_node.as_slice() else {
            panic!("{outbox:?}");
        };
        let both = Msg::Apply {
            txn: txn(1),
            partition: PartitionId(0),
            output: output.clone(),
            participants: vec![PartitionId(0), PartitionId(1)],
            more: vec![PartitionId(1)],
        };
        assert_eq!(first, &[both, apply(2, 1, &output)]);
        assert_eq!(second, &[apply(1, 0, &output)]);
    }

    #[test]
    fn messages_to_one_node_are_one_message_of_bounded_size() {
        assert_eq!(together(vec![ack(1)], 0), [ack(1)], "one alone stays as it is");
        let size = ack(1).size();
        let all = together(vec![ack(1), Msg::Pong, ack(2), ack(3)], size * 2);
        let pair = Msg::Several(vec![Inner(ack(1)), Inner(ack(2))]);
        assert_eq!(all, [Msg::Pong, pair.clone(), ack(3)]);
        assert_eq!(pair.txn(), None, "they are about two transactions");
        assert_eq!(Msg::Several(vec![Inner(ack(1)), Inner(ack(1))]).txn(), Some(txn(1)));
    }

    #[test]
    fn messages_inside_messages_inside_messages_are_refused() {
        let pair = Msg::Several(vec![Inner(ack(1)), Inner(ack(2))]);
        assert_eq!(decode::<Msg>(&encode(&pair)), Ok(pair.clone()));
        let nested = Msg::Several(vec![Inner(ack(1)), Inner(pair)]);
        let refusal = decode::<Msg>(&encode(&nested)).unwrap_err().to_string();
        assert!(refusal.starts_with("Msg.Several holds messages inside messages"), "{refusal}");
        let members = Arc::new(Members {
            epoch: 1,
            nodes: vec![NodeId(1)],
            newest: None,
            target: vec![NodeId(1)],
        });
        let under = |msg| Msg::Under {
            partition: PartitionId(0),
            members: members.clone(),
            msg: Box::new(Plain(msg)),
        };
        let flat = Msg::Several(vec![Inner(under(ack(1))), Inner(ack(2))]);
        assert_eq!(decode::<Msg>(&encode(&flat)), Ok(flat));
        for inside in [under(ack(1)), Msg::Several(vec![Inner(ack(1)), Inner(ack(2))])] {
            let refusal = decode::<Msg>(&encode(&under(inside))).unwrap_err().to_string();
            assert!(refusal.contains("holds messages inside messages"), "{refusal}");
        }
    }
}
