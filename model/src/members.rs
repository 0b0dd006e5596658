//! A change of members: one transaction at one partition, in an old and in a new epoch.
//!
//! The old epoch has n0 (h), n1 (y) and n2. One of them is replaced. To begin the new epoch, a
//! coordinator *seals* two old members: each promises the ballot of the change and answers with its
//! closing and its state. The state with which the new epoch begins is decided once, in the
//! register that also names the new members: the largest closing of the answers, and for each
//! transaction that an answer knows the value that recovery chooses. The properties are those of
//! `stamp.rs`.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;
use crate::slot::{Choice, Kind, NONE, Rules, Slot, Step, TOMBSTONE, has};

const T: u8 = 1;
/// The ballot of the change; the highest of the old epoch.
const CHANGE: u8 = 3;
/// The ballot of recovery in the new epoch. Ballot 1 is the beginning.
const RECOVERY: u8 = 2;

/// The model.
#[derive(Clone, Copy, Debug)]
pub struct Members {
    /// Recovery ballots of the old epoch, 0 to 2.
    pub ballots: u8,
    /// Whether the transaction is in direct mode.
    pub direct: bool,
    /// Closings are 1 to this.
    pub closing_max: u8,
    /// The invariant that is dropped.
    pub mutation: Option<Mutation>,
}

/// The state with which the new epoch begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Beginning {
    is_decided: bool,
    closed: u8,
    /// `NONE` if no answer knows the transaction.
    value: u8,
}

/// A state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    old: Slot<3>,
    old_closed: [u8; 3],
    old_blind: [u8; 3],
    /// Members that have sealed the old epoch, one bit each, and those that knew the transaction.
    sealed: u8,
    knew: u8,
    beginning: Beginning,
    /// The beginning that a second coordinator wrongly decides.
    second: Beginning,
    installed: u8,
    new: Slot<3>,
    new_closed: [u8; 3],
    new_blind: [u8; 3],
    learned: u16,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A step in the old epoch.
    Old(Step),
    /// A replica closes in the old epoch.
    OldClose(u8, u8),
    /// An old member seals.
    Seal(u8),
    /// The beginning of the new epoch is decided, with this value.
    Begin(u8),
    /// A second coordinator decides another beginning.
    BeginAgain(u8),
    /// A new member installs the beginning; the second one if true.
    Install(u8, bool),
    /// A step in the new epoch.
    New(Step),
    /// A replica closes in the new epoch.
    NewClose(u8, u8),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: u8| match value {
            NONE => "nothing is known".to_owned(),
            TOMBSTONE => "refused".to_owned(),
            value => format!("decided at {value}"),
        };
        match *self {
            Action::Old(step) => write!(f, "old epoch: {step}"),
            Action::OldClose(replica, to) => write!(f, "old epoch: n{replica} closes up to {to}"),
            Action::Seal(replica) => {
                write!(f, "change → n{replica}: n{replica} seals the old epoch")
            }
            Action::Begin(it) => write!(f, "the new epoch begins; transaction: {}", value(it)),
            Action::BeginAgain(it) => write!(f, "another beginning is decided: {}", value(it)),
            Action::Install(replica, is_second) => {
                write!(
                    f,
                    "change → n{replica}: installs{}",
                    if is_second { " the other" } else { "" }
                )
            }
            Action::New(step) => write!(f, "new epoch: {step}"),
            Action::NewClose(replica, to) => write!(f, "new epoch: n{replica} closes up to {to}"),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "old{} closed {:?}", self.old, self.old_closed)?;
        write!(f, " sealed {:#05b}", self.sealed)?;
        if self.beginning.is_decided {
            write!(f, " | new{} closed {:?}", self.new, self.new_closed)?;
        }
        for value in (1..=TOMBSTONE).filter(|value| self.learned & (1 << value) != 0) {
            write!(f, " LEARNED {value}")?;
        }
        Ok(())
    }
}

impl Members {
    fn drops(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn rules(&self, ballots: u8) -> Rules {
        Rules { f: 1, ballots, direct: self.direct, raises: 0, stamp_max: 8, mutation: None }
    }

    /// What the sealed members' answers allow.
    fn beginnings(&self, state: &State) -> Vec<Beginning> {
        let least = if self.drops(Mutation::MemberOneSeal) { 1 } else { 2 };
        if state.sealed.count_ones() < least {
            return Vec::new();
        }
        let answers = (0..3).filter(|&replica| has(state.sealed, replica));
        let closed =
            answers.map(|replica| state.old_closed[usize::from(replica)]).max().unwrap_or(0);
        let closed = if self.drops(Mutation::MemberNoClosings) { 0 } else { closed };
        let values = if state.knew & state.sealed == 0 || self.drops(Mutation::MemberNoValues) {
            vec![NONE]
        } else {
            let ballot = &state.old.ballots[usize::from(CHANGE) - 1];
            match state.old.choose(&self.rules(CHANGE), ballot) {
                Choice::Only(value) => vec![value],
                Choice::Free(largest) => vec![largest, TOMBSTONE],
            }
        };
        let of = |value| Beginning { is_decided: true, closed, value };
        values.into_iter().map(of).collect()
    }

    fn old_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let mut steps = Vec::new();
        state.old.steps(&self.rules(self.ballots), &mut steps);
        actions.extend(steps.into_iter().map(Action::Old));
        for replica in 0..3 {
            if !has(state.sealed, replica) {
                actions.push(Action::Seal(replica));
            }
            if !has(state.sealed, replica) || self.drops(Mutation::MemberNoSeal) {
                let least = state.old_closed[usize::from(replica)] + 1;
                let closings = least..=self.closing_max;
                actions.extend(closings.map(|to| Action::OldClose(replica, to)));
            }
        }
    }

    fn seal(&self, state: &mut State, replica: u8) {
        let it = state.old.replicas[usize::from(replica)];
        state.sealed |= 1 << replica;
        if it.kind != Kind::None || it.accepted != NONE {
            state.knew |= 1 << replica;
        }
        let step = Step::Promise { ballot: CHANGE, replica };
        state.old.apply(&self.rules(CHANGE), T, &state.old_closed, step);
        if self.drops(Mutation::MemberNoSeal) {
            // The member answers but goes on.
            state.old.replicas[usize::from(replica)] = it;
        }
    }

    fn install(state: &mut State, replica: u8, beginning: Beginning) {
        state.installed |= 1 << replica;
        state.new_closed[usize::from(replica)] = beginning.closed;
        if beginning.value == NONE {
            return;
        }
        // The beginning is ballot 1 of the new epoch.
        let it = &mut state.new.replicas[usize::from(replica)];
        (it.promised, it.accepted_ballot, it.accepted) = (1, 1, beginning.value);
        (it.stamp, it.kind) = (beginning.value, Kind::Recovery);
        let ballot = &mut state.new.ballots[0];
        if ballot.value == NONE {
            ballot.value = beginning.value;
        }
        if ballot.value == beginning.value {
            ballot.accepted |= 1 << replica;
        }
    }

    fn observe(&self, state: &mut State) {
        let blind = |slot: &Slot<3>, closed: &[u8; 3], blind: &mut [u8; 3]| {
            for (replica, it) in slot.replicas.iter().enumerate() {
                let closed = closed[replica];
                let now = if it.kind == Kind::None { closed } else { closed.min(it.stamp - 1) };
                blind[replica] = blind[replica].max(now);
            }
        };
        blind(&state.old, &state.old_closed, &mut state.old_blind);
        blind(&state.new, &state.new_closed, &mut state.new_blind);
        let rules = self.rules(CHANGE);
        state.learned |= state.old.learned(&rules) | state.new.learned(&rules);
    }
}

impl Model for Members {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        // The new member takes the number of the member that it replaces. Which one that is does
        // not matter: every member of the new epoch installs the beginning, and nothing else.
        vec![State {
            old: Slot::new(0, 0b010),
            old_closed: [0; 3],
            old_blind: [0; 3],
            sealed: 0,
            knew: 0,
            beginning: Beginning::default(),
            second: Beginning::default(),
            installed: 0,
            new: Slot::new(0, 0b010),
            new_closed: [0; 3],
            new_blind: [0; 3],
            learned: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.old_actions(state, actions);
        let beginnings = self.beginnings(state);
        if !state.beginning.is_decided {
            actions.extend(beginnings.iter().map(|it| Action::Begin(it.value)));
            return;
        }
        if self.drops(Mutation::MemberTwoStates) && !state.second.is_decided {
            actions.extend(beginnings.iter().map(|it| Action::BeginAgain(it.value)));
        }
        for replica in 0..3 {
            if !has(state.installed, replica) {
                actions.push(Action::Install(replica, false));
                if state.second.is_decided {
                    actions.push(Action::Install(replica, true));
                }
                continue;
            }
            let least = state.new_closed[usize::from(replica)] + 1;
            actions.extend((least..=self.closing_max).map(|to| Action::NewClose(replica, to)));
        }
        let mut steps = Vec::new();
        state.new.steps(&self.rules(RECOVERY), &mut steps);
        steps.retain(|step| match *step {
            Step::First | Step::Record(_) => has(state.installed, 0),
            Step::Second(replica) | Step::Direct(replica) => has(state.installed, replica),
            Step::Promise { ballot, replica } | Step::Accept { ballot, replica } => {
                ballot == RECOVERY && has(state.installed, replica)
            }
            Step::Propose { ballot, .. } => ballot == RECOVERY,
            _ => false,
        });
        actions.extend(steps.into_iter().map(Action::New));
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        match action {
            Action::Old(step) => {
                state.old.apply(&self.rules(self.ballots), T, &last.old_closed, step);
            }
            Action::OldClose(replica, to) => state.old_closed[usize::from(replica)] = to,
            Action::Seal(replica) => self.seal(&mut state, replica),
            Action::Begin(value) => {
                let all = self.beginnings(last);
                state.beginning = all.into_iter().find(|it| it.value == value)?;
            }
            Action::BeginAgain(value) => {
                let all = self.beginnings(last);
                state.second = all.into_iter().find(|it| it.value == value)?;
            }
            Action::Install(replica, is_second) => {
                let beginning = if is_second { last.second } else { last.beginning };
                Self::install(&mut state, replica, beginning);
            }
            Action::New(step) => state.new.apply(&self.rules(RECOVERY), T, &last.new_closed, step),
            Action::NewClose(replica, to) => state.new_closed[usize::from(replica)] = to,
        }
        self.observe(&mut state);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("agreement", |_, state: &State| state.learned.count_ones() <= 1),
            Property::always("visibility", |_, state: &State| {
                (1..TOMBSTONE).filter(|value| state.learned & (1 << value) != 0).all(|value| {
                    let few = |blind: &[u8; 3]| blind.iter().filter(|&&b| b >= value).count() <= 1;
                    few(&state.old_blind) && few(&state.new_blind)
                })
            }),
        ]
    }
}
