//! Snapshots: Raft §7, with pieces that are requested one after the other.

use std::collections::VecDeque;

use orthodrome_core::NodeId;

use super::leader::Mode;
use super::message::{Beat, Message};
use super::quorum::Members;
use super::replica::{Replica, Role};
use super::{Event, Index, Io, Replicated, Term};

/// A snapshot being sent.
#[derive(Debug)]
pub(super) struct Outgoing<R: Replicated> {
    /// Its number in the leader's term.
    id: u64,
    /// The follower's log starts at this index: a snapshot that covers less would leave a gap.
    at_least: Index,
    /// The entry that it covers; fixed with the first piece.
    covers: Option<(Index, Term, Members)>,
    /// Pieces sent and not acknowledged, with their numbers.
    pieces: VecDeque<(u64, R::Chunk, bool)>,
    /// The number of the next piece.
    next: u64,
    /// Where the next piece starts.
    cursor: Option<R::Cursor>,
    /// True if the last piece was sent.
    is_complete: bool,
    /// True if nothing was acknowledged since the last heartbeat.
    is_stalled: bool,
    /// The leader's round when pieces were last acknowledged. An answer that the follower sent
    /// before it received a later round may be older than that.
    acked_round: u64,
}

impl<R: Replicated> Outgoing<R> {
    fn new(id: u64, at_least: Index) -> Self {
        Self {
            id,
            at_least,
            covers: None,
            pieces: VecDeque::new(),
            next: 0,
            cursor: None,
            is_complete: false,
            is_stalled: false,
            acked_round: 0,
        }
    }

    /// The log is needed after this entry.
    pub(super) fn index(&self) -> Option<Index> {
        self.covers.as_ref().map(|&(index, _, _)| index)
    }

    /// A follower that has everything up to `matched` does not need this snapshot.
    pub(super) fn is_reached_by(&self, matched: Index) -> bool {
        self.index().is_some_and(|index| index <= matched)
    }
}

/// A piece that was requested from the embedder and not received yet, and the snapshot that needs
/// it.
#[derive(Debug)]
pub(super) struct Ask {
    to: NodeId,
    term: Term,
    snapshot: u64,
}

/// A snapshot being received.
#[derive(Debug)]
pub(super) struct Incoming {
    term: Term,
    snapshot: u64,
    /// The next piece expected.
    next: u64,
    /// True if all pieces have arrived, and the embedder is making them durable.
    is_complete: bool,
}

/// A snapshot received in full and durable.
#[derive(Debug)]
pub(super) struct Installed {
    term: Term,
    snapshot: u64,
    pieces: u64,
}

impl<R: Replicated> Replica<R> {
    /// Raft §7: the follower needs entries that the log does not have any more.
    pub(super) fn start_snapshot(&mut self, to: NodeId, at_least: Index) {
        let Role::Leader(lead) = &mut self.role else { return };
        lead.snapshots += 1;
        let id = lead.snapshots;
        if let Some(progress) = lead.of(to) {
            progress.mode = Mode::Snapshot(Box::new(Outgoing::new(id, at_least)));
            self.ask_for_piece(to);
        }
    }

    /// Requests the next piece from the embedder, if the window has room and no request is pending.
    fn ask_for_piece(&mut self, to: NodeId) {
        let window = self.config.snapshot_window;
        let surfaced = self.surfaced_index();
        let Role::Leader(lead) = &mut self.role else { return };
        let Some(progress) = lead.of(to) else { return };
        let Mode::Snapshot(outgoing) = &progress.mode else { return };
        let is_asked = self.asks.iter().any(|ask| ask.to == to);
        if is_asked || outgoing.is_complete || outgoing.pieces.len() >= window {
            return;
        }
        if outgoing.covers.is_none() && surfaced < outgoing.at_least {
            // A new leader has not applied as much yet. It tries again at the next heartbeat.
            return;
        }
        let cursor = outgoing.cursor.clone();
        self.asks.push(Ask { to, term: self.term, snapshot: outgoing.id });
        self.tell(Event::SnapshotWanted { to, cursor });
    }

    /// Answers one [`Event::SnapshotWanted`]. `chunk` starts where its cursor said. `next` is where
    /// the following piece starts, none if this is the last. An answer that nobody waits for any
    /// more is dropped.
    ///
    /// The first piece fixes the snapshot's index at what has been reported. The state must contain
    /// the effects of everything up to there, and may contain those of later entries.
    pub fn send_chunk(
        &mut self,
        to: NodeId,
        chunk: R::Chunk,
        next: Option<R::Cursor>,
        io: &mut impl Io<R>,
    ) {
        let Some(at) = self.asks.iter().position(|ask| ask.to == to) else { return };
        let ask = self.asks.swap_remove(at);
        let surfaced = self.surfaced_index();
        let covers = (surfaced, self.log.term_at(surfaced), self.log.members_at(surfaced).clone());
        let Role::Leader(lead) = &mut self.role else { return };
        let round = lead.round;
        let Some(progress) = lead.of(to) else { return };
        let Mode::Snapshot(outgoing) = &mut progress.mode else { return };
        let is_current = ask.term == self.term && ask.snapshot == outgoing.id;
        if is_current {
            if outgoing.covers.is_none() {
                let (index, Some(term), members) = covers else { return };
                outgoing.covers = Some((index, term, members));
            }
            outgoing.pieces.push_back((outgoing.next, chunk, next.is_none()));
            outgoing.next += 1;
            outgoing.is_complete = next.is_none();
            outgoing.cursor = next;
            let beat = Beat { round, sent_at: io.now() };
            if let Some(piece) = outgoing.pieces.back()
                && let Some(msg) = piece_message(self.term, outgoing, piece, beat)
            {
                io.send(to, msg);
            }
        }
        self.ask_for_piece(to);
    }

    /// At every heartbeat: resends pieces that were not acknowledged for a whole interval, and
    /// tries again to begin snapshots that could not begin.
    pub(super) fn resend_pieces(&mut self, io: &mut impl Io<R>) {
        let mut waiting = Vec::new();
        let Role::Leader(lead) = &mut self.role else { return };
        let beat = Beat { round: lead.round, sent_at: io.now() };
        for progress in &mut lead.progress {
            let Mode::Snapshot(outgoing) = &mut progress.mode else { continue };
            if outgoing.covers.is_none() {
                waiting.push(progress.node);
            }
            if std::mem::replace(&mut outgoing.is_stalled, true) {
                for piece in &outgoing.pieces {
                    if let Some(msg) = piece_message(self.term, outgoing, piece, beat) {
                        io.send(progress.node, msg);
                    }
                }
            }
        }
        for node in waiting {
            self.ask_for_piece(node);
        }
    }

    pub(super) fn on_snapshot_reply(
        &mut self,
        from: NodeId,
        (snapshot, next): (u64, u64),
        at_least: Index,
        beat: Beat,
        io: &mut impl Io<R>,
    ) {
        self.on_append_reply(from, Index(0), Index(0), beat, io);
        let Role::Leader(lead) = &mut self.role else { return };
        let round = lead.round;
        let Some(progress) = lead.of(from) else { return };
        let Mode::Snapshot(outgoing) = &mut progress.mode else { return };
        if snapshot != outgoing.id {
            return;
        }
        let acknowledged = outgoing.pieces.iter().take_while(|piece| piece.0 < next).count();
        outgoing.pieces.drain(..acknowledged);
        if acknowledged > 0 {
            outgoing.is_stalled = false;
            outgoing.acked_round = round;
        }
        let is_less = outgoing.pieces.front().map_or(outgoing.next, |piece| piece.0) > next;
        // It confirms less than before, and the answer is later: it is not a late or repeated
        // answer.
        let is_forgotten = is_less && beat.round > outgoing.acked_round;
        let is_short = outgoing.index().is_some_and(|index| index < at_least);
        if is_forgotten || is_short {
            // The follower restarted, and both sides have lost pieces that it had; or its log
            // starts after this snapshot.
            self.start_snapshot(from, at_least);
        } else if outgoing.is_complete && outgoing.pieces.is_empty() {
            let index = outgoing.index().unwrap_or_default();
            self.on_append_reply(from, index, index, beat, io);
        } else {
            self.ask_for_piece(from);
        }
    }

    /// True if all pieces have arrived and are being made durable. Until then the log on disk is
    /// the old one, so nothing can be appended to the new one.
    pub(super) fn awaits_snapshot(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.is_complete)
    }

    /// True if the state belongs to one entry of the log. False while a snapshot arrives, and after an
    /// interrupted one, until a whole one has arrived.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.incomplete
    }

    /// True if the leader of this term is sending a snapshot.
    pub(super) fn receives_snapshot(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.term == self.term)
    }

    /// Raft Figure 13, receiver.
    pub(super) fn on_snapshot_piece(&mut self, from: NodeId, msg: Message<R>, io: &mut impl Io<R>) {
        let Message::SnapshotPiece {
            term,
            snapshot,
            piece,
            index,
            index_term,
            members,
            chunk,
            is_last,
            ..
        } = msg
        else {
            return;
        };
        if self.awaits_snapshot() {
            return;
        }
        if let Some(done) = &self.installed
            && done.term == term
            && done.snapshot >= snapshot
        {
            let next = if done.snapshot == snapshot { done.pieces } else { 0 };
            self.reply_to_piece(from, snapshot, next, io);
            return;
        }
        if !self.incomplete && self.pushed >= index {
            // The state already has all of it: the leader only needs to learn that.
            self.on_heartbeat(from, Index(0), self.beat, None, io);
            return;
        }
        let is_known = self
            .incoming
            .as_ref()
            .is_some_and(|incoming| incoming.term == term && incoming.snapshot >= snapshot);
        if piece == 0 && !is_known && index >= self.log.base_index() {
            self.incomplete = true;
            self.incoming = Some(Incoming { term, snapshot, next: 0, is_complete: false });
        }
        let Some(incoming) = self
            .incoming
            .as_mut()
            .filter(|incoming| incoming.term == term && incoming.snapshot == snapshot)
        else {
            self.reply_to_piece(from, snapshot, 0, io);
            return;
        };
        if piece != incoming.next {
            let next = incoming.next;
            self.reply_to_piece(from, snapshot, next, io);
            return;
        }
        incoming.next += 1;
        incoming.is_complete = is_last;
        let next = incoming.next;
        self.tell(Event::SnapshotChunk { chunk, first: piece == 0, last: is_last, index });
        if is_last {
            self.install(index, index_term, *members);
        } else {
            self.reply_to_piece(from, snapshot, next, io);
        }
    }

    /// The state is complete as of `index`, and the log follows it.
    fn install(&mut self, index: Index, term: Term, members: Members) {
        if !self.log.install(index, term, members) {
            self.writes.clear();
            self.durable_index = Index(0);
            self.received = index;
        }
        self.received = self.received.max(index);
        self.incomplete = false;
        self.pushed = index;
        self.choose(index);
    }

    fn reply_to_piece(&mut self, to: NodeId, snapshot: u64, next: u64, io: &mut impl Io<R>) {
        let (term, at_least, beat) = (self.term, self.log.base_index(), self.beat);
        let msg = Message::SnapshotReply { term, snapshot, next, at_least, beat };
        self.send_when_term_durable(to, msg, io);
    }

    /// The state of the last snapshot and the records of [`Replica::checkpoint_records`] are
    /// durable: the follower may build on them and acknowledge them.
    pub fn snapshot_durable(&mut self, io: &mut impl Io<R>) {
        let Some(incoming) = self.incoming.take_if(|incoming| incoming.is_complete) else {
            return;
        };
        let Incoming { term, snapshot, next, .. } = incoming;
        self.installed = Some(Installed { term, snapshot, pieces: next });
        self.durable_index = self.durable_index.max(self.log.base_index());
        if let Some(leader) = self.leader.filter(|_| term == self.term) {
            self.reply_to_piece(leader, snapshot, next, io);
        }
    }
}

fn piece_message<R: Replicated>(
    term: Term,
    outgoing: &Outgoing<R>,
    (piece, chunk, is_last): &(u64, R::Chunk, bool),
    beat: Beat,
) -> Option<Message<R>> {
    let (index, index_term, members) = outgoing.covers.clone()?;
    Some(Message::SnapshotPiece {
        term,
        snapshot: outgoing.id,
        piece: *piece,
        index,
        index_term,
        members: Box::new(members),
        chunk: chunk.clone(),
        is_last: *is_last,
        beat,
    })
}
