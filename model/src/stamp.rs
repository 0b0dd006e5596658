//! One transaction at one partition, against every pattern of closings.
//!
//! Conflicting transactions matter to a slot only through closings, so here the environment closes
//! as it likes. Two properties are checked. *Agreement*: at most one value is ever learned.
//! *Visibility*: if v was learned, then no majority could close up to v or more without reporting
//! the transaction. `order.rs` checks what follows for several transactions.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;
use crate::slot::{Kind, NONE, Rules, Slot, Step, TOMBSTONE, has};

/// The client's timestamp. Closings below it change nothing.
const T: u8 = 1;

/// The model of one configuration.
#[derive(Clone, Copy, Debug)]
pub struct Stamps<const N: usize> {
    /// The rules.
    pub rules: Rules,
    /// Closings are 1 to this.
    pub closing_max: u8,
    /// Whether the network heals at some moment. Then the last ballot is used after it only.
    pub heals: bool,
    /// Whether one replica may lose its disk. The transaction was begun before that.
    pub loses_disk: bool,
    /// What loses a replica is no failure but a change of members: another server takes its place, and
    /// the former member goes on as if it did not know.
    pub goes_on: bool,
}

/// Everything durable, and the history for the properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State<const N: usize> {
    slot: Slot<N>,
    closed: [u8; N],
    /// The highest timestamp up to which a replica has closed without reporting the transaction.
    blind: [u8; N],
    /// Every value that was ever learned, one bit each.
    learned: u16,
    /// A mutation has restarted a replica.
    has_restarted: bool,
    is_healed: bool,
    /// Replicas that never come back, one bit each.
    dead: u8,
    /// The replica that has lost its disk, as one bit. What the disk said stays as it was, because
    /// answers may be on their way. If members change, it is the one that another server replaces.
    lost: u8,
    /// Peers that have answered the replica with the new disk, one bit each.
    sealed: u8,
    /// Those of them that did not know it: they give it no stamp.
    unsure: u8,
    /// One of them knew it.
    is_known: bool,
    /// The replica with the new disk has asked f + 1 peers, and takes part again.
    is_whole: bool,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A step of the transaction.
    Step(Step),
    /// A replica closes.
    Close {
        /// The replica.
        replica: u8,
        /// Up to this timestamp.
        to: u8,
    },
    /// A replica restarts and loses the state that the mutation names.
    Restart(u8),
    /// The network heals. These replicas, one bit each, stay dead.
    Heal(u8),
    /// A replica loses its disk.
    Lose(u8),
    /// A peer answers the replica with the new disk.
    Seal(u8),
    /// The replica with the new disk takes part again.
    Rejoin,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Step(step) => write!(f, "{step}"),
            Action::Close { replica, to } => {
                write!(f, "another transaction → n{replica}: n{replica} closes up to {to}")
            }
            Action::Restart(replica) => write!(f, "n{replica} restarts with a loss"),
            Action::Heal(dead) => write!(f, "the network heals; dead replicas: {dead:#b}"),
            Action::Lose(replica) => write!(f, "n{replica} loses its disk, or its place"),
            Action::Seal(replica) => {
                write!(f, "the replica with the new disk → n{replica}: n{replica} is sealed")
            }
            Action::Rejoin => write!(f, "the replica with the new disk takes part again"),
        }
    }
}

impl<const N: usize> fmt::Display for State<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} closed {:?}", self.slot, self.closed)?;
        for value in (1..=TOMBSTONE).filter(|value| self.learned & (1 << value) != 0) {
            match value {
                TOMBSTONE => write!(f, " LEARNED refused")?,
                value => write!(f, " LEARNED {value}")?,
            }
        }
        Ok(())
    }
}

impl<const N: usize> Stamps<N> {
    fn is_allowed(&self, state: &State<N>, step: Step) -> bool {
        let last = self.rules.ballots;
        let is_after = state.is_healed;
        if actor(state, step).is_some_and(|replica| !self.takes_part(state, replica, step)) {
            return false;
        }
        match step {
            Step::Promise { ballot, replica } | Step::Accept { ballot, replica } => {
                self.is_ballot_allowed(is_after, ballot, last) && !has(state.dead, replica)
            }
            Step::Propose { ballot, .. } => self.is_ballot_allowed(is_after, ballot, last),
            Step::Direct(replica)
            | Step::Ack(replica)
            | Step::SlowAccept(replica)
            | Step::RaiseSecond(replica)
            | Step::Second(replica) => !has(state.dead, replica),
            Step::First | Step::Record(_) | Step::Slow | Step::RaiseFirst(_) => {
                !has(state.dead, state.slot.h)
            }
        }
    }

    /// True if a replica may take this step, with one disk lost.
    fn takes_part(&self, state: &State<N>, replica: u8, step: Step) -> bool {
        let only_accepts = match step {
            Step::Promise { .. } | Step::Propose { .. } | Step::Accept { .. } => true,
            Step::First
            | Step::Second(_)
            | Step::Direct(_)
            | Step::Ack(_)
            | Step::Record(_)
            | Step::Slow
            | Step::SlowAccept(_)
            | Step::RaiseSecond(_)
            | Step::RaiseFirst(_) => false,
        };
        let takes_part = self.goes_on || !has(state.lost, replica);
        takes_part && (only_accepts || !self.is_unsure(state, replica))
    }

    /// True if a replica must give no stamp.
    fn is_unsure(&self, state: &State<N>, replica: u8) -> bool {
        let accepted = state.slot.replicas[usize::from(replica)].accepted;
        has(state.unsure, replica) && accepted == NONE && !self.gives_late_stamps()
    }

    /// A step of the transaction. A replica that is unsure promises without a stamp.
    fn take(&self, state: &mut State<N>, step: Step) {
        let before = state.slot.replicas;
        state.slot.apply(&self.rules, T, &state.closed, step);
        if let Step::Promise { replica, .. } = step
            && self.is_unsure(state, replica)
        {
            let it = &mut state.slot.replicas[usize::from(replica)];
            let before = &before[usize::from(replica)];
            (it.stamp, it.kind) = (before.stamp, before.kind);
        }
    }

    fn losses(&self, state: &State<N>, actions: &mut Vec<Action>) {
        let ids = 0..N as u8;
        if state.lost == 0 {
            let may_lose = self.loses_disk && !state.is_healed && !state.has_restarted;
            actions.extend(ids.filter(|_| may_lose).map(Action::Lose));
            return;
        }
        if state.is_whole || state.lost & state.dead != 0 {
            return;
        }
        let is_open = |id: &u8| !has(state.lost | state.sealed | state.dead, *id);
        actions.extend(ids.filter(is_open).map(Action::Seal));
        if state.sealed.count_ones() > self.rules.f.into() {
            actions.push(Action::Rejoin);
        }
    }

    fn is_ballot_allowed(&self, is_after: bool, ballot: u8, last: u8) -> bool {
        !self.heals || (ballot == last) == is_after
    }

    fn closings(&self, state: &State<N>, actions: &mut Vec<Action>) {
        if state.is_healed {
            return;
        }
        for replica in 0..N as u8 {
            let it = &state.slot.replicas[usize::from(replica)];
            let is_lost = has(state.lost, replica);
            let is_silent = !state.is_whole && !self.goes_on;
            if is_lost && (is_silent || state.is_whole && state.is_known && !self.reads_early()) {
                // It does not answer, or reports the transaction whatever it closes.
                continue;
            }
            // Above a stamp that stays, a closing changes nothing.
            let stays = matches!(it.kind, Kind::Confirmed | Kind::Recovery)
                && !(is_lost && state.is_whole)
                && self.rules.raises == 0
                && self.rules.mutation.is_none();
            let most = if stays { self.closing_max.min(it.stamp - 1) } else { self.closing_max };
            let least = state.closed[usize::from(replica)] + 1;
            actions.extend((least..=most).map(|to| Action::Close { replica, to }));
        }
    }

    fn restart(&self, state: &mut State<N>, replica: u8) {
        let it = &mut state.slot.replicas[usize::from(replica)];
        match self.rules.mutation {
            Some(Mutation::LoseClosings) => state.closed[usize::from(replica)] = 0,
            Some(Mutation::LoseStamps) => (it.stamp, it.kind) = (NONE, Kind::None),
            Some(Mutation::LosePromises) => it.promised = 0,
            Some(Mutation::LoseRecord) => it.accepted = NONE,
            _ => {}
        }
        state.has_restarted = true;
    }

    fn loses(&self) -> bool {
        matches!(
            self.rules.mutation,
            Some(
                Mutation::LoseClosings
                    | Mutation::LoseStamps
                    | Mutation::LosePromises
                    | Mutation::LoseRecord
            )
        )
    }

    fn reads_early(&self) -> bool {
        let mutations = [Mutation::ReadsEarly, Mutation::MemberReadsEarly];
        mutations.into_iter().any(|it| self.rules.drops(it))
    }

    fn gives_late_stamps(&self) -> bool {
        let mutations = [Mutation::NoSeal, Mutation::MemberNoSeal];
        mutations.into_iter().any(|it| self.rules.drops(it))
    }

    fn observe(&self, state: &mut State<N>) {
        for (replica, it) in (0..).zip(&state.slot.replicas) {
            let closed = state.closed[usize::from(replica)];
            let is_lost = has(state.lost, replica);
            let is_new = is_lost && state.is_whole;
            let unreported = match it.kind {
                _ if is_new && state.is_known && !self.reads_early() => NONE,
                _ if is_new => closed,
                _ if is_lost && !self.goes_on => NONE,
                Kind::None => closed,
                Kind::Direct | Kind::Confirmed | Kind::Recovery => closed.min(it.stamp - 1),
            };
            let blind = &mut state.blind[usize::from(replica)];
            *blind = unreported.max(*blind);
        }
        state.learned |= state.slot.learned(&self.rules);
        if state.is_whole && !state.is_known {
            // The replica with the new disk says so to whoever asks.
            state.learned |= 1 << TOMBSTONE;
        }
    }
}

impl<const N: usize> State<N> {
    /// True if a replica has anything about the transaction.
    fn knows(&self, replica: u8) -> bool {
        let it = &self.slot.replicas[usize::from(replica)];
        it.kind != Kind::None || it.accepted != NONE
    }
}

/// The replica that takes a step.
fn actor<const N: usize>(state: &State<N>, step: Step) -> Option<u8> {
    match step {
        Step::Promise { replica, .. } | Step::Accept { replica, .. } => Some(replica),
        Step::Propose { .. } => None,
        Step::Direct(replica)
        | Step::Ack(replica)
        | Step::SlowAccept(replica)
        | Step::RaiseSecond(replica)
        | Step::Second(replica) => Some(replica),
        Step::First | Step::Record(_) | Step::Slow | Step::RaiseFirst(_) => Some(state.slot.h),
    }
}

impl<const N: usize> Model for Stamps<N> {
    type State = State<N>;
    type Action = Action;

    fn init_states(&self) -> Vec<State<N>> {
        let named = if N == 3 { 0b010 } else { 0b0_1110 };
        vec![State {
            slot: Slot::new(0, named),
            closed: [0; N],
            blind: [0; N],
            learned: 0,
            has_restarted: false,
            is_healed: false,
            dead: 0,
            lost: 0,
            sealed: 0,
            unsure: 0,
            is_known: false,
            is_whole: false,
        }]
    }

    fn actions(&self, state: &State<N>, actions: &mut Vec<Action>) {
        let mut steps = Vec::new();
        state.slot.steps(&self.rules, &mut steps);
        steps.retain(|&step| self.is_allowed(state, step));
        actions.extend(steps.into_iter().map(Action::Step));
        self.closings(state, actions);
        self.losses(state, actions);
        if self.loses() && !state.has_restarted {
            actions.extend((0..N as u8).map(Action::Restart));
        }
        if self.heals && !state.is_healed {
            // Of this transaction a lost disk is a dead replica.
            let gone = |dead: u8| (dead | state.lost).count_ones();
            let few = (0..1 << N).filter(|&dead| gone(dead) <= self.rules.f.into());
            actions.extend(few.map(Action::Heal));
        }
    }

    fn next_state(&self, last: &State<N>, action: Action) -> Option<State<N>> {
        let mut state = *last;
        match action {
            Action::Step(step) => self.take(&mut state, step),
            Action::Close { replica, to } => state.closed[usize::from(replica)] = to,
            Action::Restart(replica) => self.restart(&mut state, replica),
            Action::Heal(dead) => (state.is_healed, state.dead) = (true, dead),
            Action::Lose(replica) => state.lost = 1 << replica,
            Action::Seal(replica) => {
                state.sealed |= 1 << replica;
                let is_known = state.knows(replica);
                state.unsure |= u8::from(!is_known) << replica;
                state.is_known |= is_known;
            }
            Action::Rejoin => state.is_whole = true,
        }
        self.observe(&mut state);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("agreement", |_, state: &State<N>| state.learned.count_ones() <= 1),
            Property::always("visibility", |model, state: &State<N>| {
                (1..TOMBSTONE).filter(|value| state.learned & (1 << value) != 0).all(|value| {
                    let blind = state.blind.iter().filter(|&&blind| blind >= value).count();
                    blind <= usize::from(model.rules.f)
                })
            }),
            Property::always("liveness", |model: &Self, state: &State<N>| {
                let mut actions = Vec::new();
                if state.is_healed && state.learned == 0 {
                    model.actions(state, &mut actions);
                    return !actions.is_empty();
                }
                true
            }),
        ]
    }
}
