//! Connections to agents: round trips, restarts (fences), and prepared branches that nobody has ended.

use orthodrome_core::id::NodeId;
use orthodrome_core::time::Time;

use super::{Middleware, Out, Phase, Stage};
use crate::contract::{Effect, Fence, Note, Reason, Timer, ToAgent, Work, Xid};

impl<W: Work> Middleware<W> {
    pub(super) fn on_attached(
        &mut self,
        from: NodeId,
        epoch: u64,
        fence: Fence,
        io: Out<'_, '_, W>,
    ) {
        if epoch != self.epoch {
            return;
        }
        let Some(source) = self.sources.get_mut(&from) else { return };
        source.is_attached = true;
        self.learn_fence(from, fence, None, io);
        let waiting: Vec<Xid> = self
            .open
            .iter()
            .filter(|(_, open)| {
                open.branches
                    .get(&from)
                    .is_some_and(|b| b.outbox.is_some() && b.stage != Stage::Waiting)
            })
            .map(|(&xid, _)| xid)
            .collect();
        for xid in waiting {
            self.transmit(xid, from, io);
        }
        self.send(from, ToAgent::Scan { epoch }, io);
    }

    pub(super) fn on_pong(
        &mut self,
        from: NodeId,
        sent: Time,
        fence: Fence,
        is_attached: bool,
        io: Out<'_, '_, W>,
    ) {
        let Some(source) = self.sources.get_mut(&from) else { return };
        source.rtt.add(io.now.since(sent), self.config.rtt_weight_percent);
        let was_attached = std::mem::replace(&mut source.is_attached, is_attached);
        self.learn_fence(from, fence, Some(sent), io);
        match (was_attached, is_attached) {
            (_, false) => self.send(from, ToAgent::Attach { epoch: self.epoch }, io),
            // The answer to the attach request was lost.
            (false, true) => self.on_attached(from, self.epoch, fence, io),
            (true, true) => {}
        }
    }

    /// The incarnations of a source and its agent. In a new one, the branches that were open there
    /// and not prepared are lost.
    pub(super) fn learn_fence(
        &mut self,
        from: NodeId,
        fence: Fence,
        sent: Option<Time>,
        io: Out<'_, '_, W>,
    ) {
        let Some(source) = self.sources.get_mut(&from) else { return };
        let is_new = source.fence.replace(fence).is_some_and(|before| before != fence);
        if is_new {
            // Transactions that waited there wait no longer.
            self.waits.remove(&from);
        }
        if let Some(sent) = sent {
            source.confirmed = source.confirmed.max(sent);
        }
        let here: Vec<Xid> = self
            .open
            .iter()
            .filter(|(_, open)| open.branches.contains_key(&from))
            .map(|(&xid, _)| xid)
            .collect();
        for xid in here {
            let Some(open) = self.open.get(&xid) else { continue };
            let Some(branch) = open.branches.get(&from) else { continue };
            let is_lost = is_new
                && branch.is_sent
                && !matches!(branch.stage, Stage::Prepared | Stage::Preparing);
            match open.phase {
                Phase::Logging(..) => {}
                // A branch that commits in one phase is asked until its agent reports the outcome.
                Phase::Committing => {}
                Phase::Voting => self.count_votes(xid, io),
                Phase::Idle | Phase::Executing | Phase::HeldBack { .. } => {
                    if is_lost && !branch.is_committing() {
                        self.abort(xid, None, Reason::Restarted.into(), io);
                    }
                }
            }
        }
    }

    /// Pings a source at once for a transaction whose votes are in. Each answer counts the votes of
    /// all transactions again. So there is one such ping at a time: on a slow link, the answers
    /// would otherwise cause more and more pings.
    pub(super) fn ask_fence(&mut self, source: NodeId, io: Out<'_, '_, W>) {
        let Some(known) = self.sources.get_mut(&source) else { return };
        if known.asked <= known.confirmed {
            known.asked = io.now;
            self.ping(source, io);
        }
    }

    fn ping(&mut self, source: NodeId, io: Out<'_, '_, W>) {
        let ours = |xid: &&Xid| xid.epoch == self.epoch;
        let pending =
            self.open.keys().chain(self.decided.keys()).chain(self.aborting.keys()).filter(ours);
        let oldest = pending.map(|xid| xid.number).min().unwrap_or(self.number + 1);
        let ping = ToAgent::Ping { epoch: self.epoch, sent: io.now, oldest };
        self.send(source, ping, io);
    }

    /// Handles the list of branches that are prepared at a source. Commits those whose commit is
    /// decided, and rolls back those of unknown transactions.
    pub(super) fn on_scanned(
        &mut self,
        from: NodeId,
        epoch: u64,
        prepared: Vec<Xid>,
        io: Out<'_, '_, W>,
    ) {
        if epoch != self.epoch {
            return;
        }
        for xid in prepared {
            if xid.middleware != self.node || xid.epoch > self.epoch || self.open.contains_key(&xid)
            {
                continue;
            }
            if let Some(decided) = self.decided.get(&xid) {
                self.send(from, ToAgent::Commit { xid, at: decided.at, one_phase: false }, io);
            } else {
                io.push(Effect::Note(Note::Orphan));
                self.aborting.entry(xid).or_default().insert(from);
                self.send(from, ToAgent::Rollback { xid }, io);
                io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
            }
        }
    }

    pub(super) fn on_ping_timeout(&mut self, io: Out<'_, '_, W>) {
        for source in self.config.sources.keys().copied().collect::<Vec<_>>() {
            self.ping(source, io);
        }
        io.push(Effect::SetTimer(Timer::Ping, io.now + self.config.ping_interval));
    }

    pub(super) fn on_scan_timeout(&mut self, io: Out<'_, '_, W>) {
        for source in self.config.sources.keys().copied().collect::<Vec<_>>() {
            self.send(source, ToAgent::Scan { epoch: self.epoch }, io);
        }
        io.push(Effect::SetTimer(Timer::Scan, io.now + self.config.scan_interval));
    }
}
