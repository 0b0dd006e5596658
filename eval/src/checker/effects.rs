//! Which attempts took effect, and under which commit timestamps.

use orthodrome_core::ordered::OrdMap;

use super::lists::Appends;
use crate::history::dense::Dense;
use crate::history::{History, KeyId, ListRef, NOBODY, OpRef, Status, UNKNOWN};

/// The effect of each attempt, as far as the history shows it.
#[derive(Debug)]
pub(super) struct Effects {
    /// True for attempts that committed. Also true for attempts of unknown outcome whose writes
    /// were read by an attempt for which this is true.
    pub(super) took: Dense<bool>,
    /// The commit timestamp, stated by the writer or by its first reader, or [`UNKNOWN`].
    pub(super) timestamps: Dense<u64>,
}

impl Effects {
    /// Computes the effects. It looks at every attempt, and at everything that it read, once.
    pub(super) fn new(history: &History, appends: &Appends) -> Self {
        let mut effects = Self {
            took: Dense::from(
                history.attempts().map(|a| history.status(a) == Status::Ok).collect::<Vec<_>>(),
            ),
            timestamps: Dense::from(
                history.attempts().map(|a| history.timestamp(a)).collect::<Vec<_>>(),
            ),
        };
        let mut todo: Vec<u32> = Vec::new();
        // Committed transactions read every element of every trunk. Prefixes of trunks that others
        // read therefore say nothing new.
        for key in 0..history.keys_len() {
            effects.observe(history, appends, key, history.trunk(key), &mut todo);
        }
        for attempt in history.attempts() {
            if history.status(attempt) == Status::Ok {
                effects.follow(history, appends, attempt, &mut todo);
            }
        }
        while let Some(attempt) = todo.pop() {
            effects.follow(history, appends, attempt, &mut todo);
        }
        effects
    }

    /// Marks everything that an attempt which took effect has read.
    fn follow(&mut self, history: &History, appends: &Appends, attempt: u32, todo: &mut Vec<u32>) {
        for op in history.ops(attempt) {
            match op {
                OpRef::ReadList { key, list: ListRef::Odd(odd) } => {
                    self.observe(history, appends, key, history.odd_list(odd), todo);
                }
                OpRef::ReadVersion { key, writer, timestamp, .. } if writer != NOBODY => {
                    let is_settled = self.took[writer] && self.timestamps[writer] != UNKNOWN;
                    let has_failed = history.status(writer) == Status::Fail;
                    if is_settled || has_failed || !writes(history, writer, key) {
                        continue;
                    }
                    if self.timestamps[writer] == UNKNOWN {
                        self.timestamps[writer] = timestamp;
                    }
                    self.mark(writer, todo);
                }
                OpRef::ReadList { .. }
                | OpRef::ReadVersion { .. }
                | OpRef::Append { .. }
                | OpRef::Write { .. } => {}
            }
        }
    }

    fn observe(
        &mut self,
        history: &History,
        appends: &Appends,
        key: KeyId,
        list: &[u64],
        todo: &mut Vec<u32>,
    ) {
        for append in list.iter().filter_map(|element| appends.find(key, *element)) {
            let writer = appends.row(append).attempt;
            if history.status(writer) == Status::Info {
                self.mark(writer, todo);
            }
        }
    }

    fn mark(&mut self, attempt: u32, todo: &mut Vec<u32>) {
        if !std::mem::replace(&mut self.took[attempt], true) {
            todo.push(attempt);
        }
    }
}

/// True if the attempt wrote a version of the key.
pub(super) fn writes(history: &History, attempt: u32, key: KeyId) -> bool {
    history.ops(attempt).any(|op| matches!(op, OpRef::Write { key: k, .. } if k == key))
}

/// Trunks that grow by the reads of attempts of unknown outcome which turn out to have committed.
pub(super) fn longer_trunks(history: &History, effects: &Effects) -> OrdMap<KeyId, Vec<u64>> {
    let mut longer: OrdMap<KeyId, Vec<u64>> = OrdMap::new();
    if history.odd_lists_len() == 0 {
        return longer;
    }
    for attempt in history.attempts().filter(|attempt| effects.took[*attempt]) {
        for op in history.ops(attempt) {
            if let OpRef::ReadList { key, list: ListRef::Odd(odd) } = op {
                let list = history.odd_list(odd);
                let trunk = longer.get(&key).map_or(history.trunk(key), Vec::as_slice);
                if list.len() > trunk.len() && list.starts_with(trunk) {
                    longer.insert(key, list.to_vec());
                }
            }
        }
    }
    longer
}
