//! Deadlocks across sources.

use orthodrome_core::id::NodeId;

use super::{Branch, Middleware, Out, Phase};
use crate::contract::{Effect, Note, Reason, Wait, Work, Xid};
use crate::deadlock::cycle;

impl<W: Work> Middleware<W> {
    /// Ends deadlocks across sources: aborts the youngest transaction of each cycle that can still
    /// be rolled back.
    pub(super) fn on_waits(
        &mut self,
        from: NodeId,
        look: u64,
        (waits, more): (Vec<Wait>, bool),
        io: Out<'_, '_, W>,
    ) {
        if !self.config.finds_deadlocks {
            return;
        }
        let seen = self.waits.entry(from).or_default();
        if look < seen.look {
            return;
        }
        // Agents of an earlier version do not number their looks: 0.
        if look > seen.look || look == 0 {
            *seen = Seen { look, waits: Vec::new(), is_whole: false };
        }
        seen.waits.extend(waits);
        // Messages may overtake each other.
        seen.is_whole |= !more;
        if !seen.is_whole {
            return;
        }
        // A message may come twice.
        seen.waits.sort();
        seen.waits.dedup();
        loop {
            let is_open = |xid: &Xid| xid.middleware != self.node || self.open.contains_key(xid);
            let waits = self.waits.values().flat_map(|seen| &seen.waits);
            let Some(cycle) = cycle(waits, is_open) else { return };
            let victim = cycle.into_iter().filter(|xid| self.can_abort(*xid)).max();
            // If the youngest belongs to another middleware, that one sees the same cycle and acts,
            // or its source decides.
            let Some(victim) = victim.filter(|xid| xid.middleware == self.node) else { return };
            io.push(Effect::Note(Note::GlobalDeadlock));
            self.abort(victim, None, Reason::Deadlock.into(), io);
        }
    }

    /// True if no branch of the transaction commits by itself. Transactions of other middlewares
    /// are assumed to be so.
    pub(super) fn can_abort(&self, xid: Xid) -> bool {
        let Some(open) = self.open.get(&xid) else { return xid.middleware != self.node };
        let is_committing = |branch: &Branch<W>| branch.is_committing() && branch.is_sent;
        !matches!(open.phase, Phase::Logging(..)) && !open.branches.values().any(is_committing)
    }
}

/// The waits between transactions at one source.
#[derive(Debug, Default)]
pub(super) struct Seen {
    look: u64,
    waits: Vec<Wait>,
    /// The last message of the look has come.
    is_whole: bool,
}
