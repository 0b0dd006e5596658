//! The work of a transaction, and its bound.
//!
//! A transaction has a bounded number of commands, with a bounded number of bytes. But one short
//! command may touch all of a long value, or of many of them, so a thousand of them could keep a
//! processor busy for minutes. Work is counted in bytes of the values that a command passes over,
//! with [`ELEMENT_BYTES`] for each element, before the command runs. It depends on the commands and
//! the values only, so every replica and the gateway count the same. Commands that look up elements
//! by name count nothing: their arguments bound them.

use super::entry::ELEMENT_BYTES;
use super::hashes::Hashes;
use super::keys::{self, Keys};
use super::lists::Lists;
use super::pops::Popped;
use super::sets::Sets;
use super::sorted::{Sorted, Span};
use super::state::Slot;
use super::strings::Strings;
use super::{Command, random};
use crate::txn::AbortReason;

/// The most work of one transaction, in bytes.
pub const WORK_BYTES_MAX: usize = 64 << 20;

/// The work that a transaction may still do.
#[derive(Debug)]
pub struct Meter {
    left: usize,
}

impl Meter {
    /// For a transaction that begins.
    pub fn new() -> Self {
        Self { left: WORK_BYTES_MAX }
    }

    /// What is left.
    pub fn left(&self) -> u64 {
        self.left as u64
    }

    /// Sets what is left, after a script that counted itself.
    pub fn set_left(&mut self, left: u64) {
        self.left = usize::try_from(left).unwrap_or(usize::MAX).min(self.left);
    }

    /// Counts the work of a command on these keys.
    ///
    /// # Errors
    /// It exceeds the bound.
    pub fn charge(&mut self, command: &Command, slots: &mut [Slot]) -> Result<(), AbortReason> {
        let left = self.left.checked_sub(work(command, slots));
        self.left = left.ok_or(AbortReason::TooLarge)?;
        Ok(())
    }
}

/// The bytes that a command passes over, at most.
pub(super) fn work(command: &Command, slots: &mut [Slot]) -> usize {
    let size = |slots: &[Slot], key: u32| slots.get(key as usize).map_or(0, Slot::cost);
    let sizes =
        |keys: &[u32]| keys.iter().fold(0_usize, |sum, key| sum.saturating_add(size(slots, *key)));
    match command {
        Command::Strings(key, command) if passes_over(command) => size(slots, *key),
        Command::Hashes(key, Hashes::All | Hashes::Fields | Hashes::Values)
        | Command::Sets(key, Sets::Members | Sets::Pop(_))
        | Command::Keys(key, Keys::Describe(_))
        | Command::Copy(key, ..)
        | Command::Rename(key, ..) => size(slots, *key),
        Command::Hashes(key, Hashes::Random(count, _)) | Command::Sets(key, Sets::Random(count)) => {
            size(slots, *key).saturating_add(random::work(*count))
        }
        Command::Lists(key, command) => match slots.get(*key as usize) {
            Some(slot) => list_work(command, slot),
            None => 0,
        },
        Command::Sorted(key, command) => match slots.get_mut(*key as usize) {
            Some(slot) => sorted_work(command, slot),
            None => 0,
        },
        Command::Combine(_, keys)
        | Command::CombineInto(_, _, keys)
        | Command::CountShared(keys, _) => sizes(keys),
        // The members are combined, and then sorted.
        Command::Merge(merge, _)
        | Command::MergeInto(_, merge)
        | Command::CountMerged(merge, _) => sizes(&merge.keys).saturating_mul(2),
        Command::RangeInto { source, .. } => slots.get_mut(*source as usize).map_or(0, ordered),
        Command::PopFirst(keys, popped, _) => match popped {
            Popped::Elements(_) => 0,
            Popped::Lowest | Popped::Highest => {
                let mut work = 0_usize;
                for (key, _) in keys {
                    work = work.saturating_add(slots.get_mut(*key as usize).map_or(0, ordered));
                }
                work
            }
        },
        Command::Strings(..)
        | Command::Hashes(..)
        | Command::Sets(..)
        | Command::Keys(..)
        | Command::GetSeveral(_)
        | Command::SetSeveral(_)
        | Command::SetSeveralIfAbsent(_)
        | Command::Delete(_)
        | Command::Exists(_)
        | Command::MoveMember(..)
        | Command::MoveElement(..)
        | Command::Watch(_)
        | Command::Mark(_)
        | Command::Publish { .. }
        // It counts itself while it runs.
        | Command::Script(_) => 0,
    }
}

/// True if a command passes over the whole string.
fn passes_over(command: &Strings) -> bool {
    match command {
        Strings::Append(_)
        | Strings::SetRange(..)
        | Strings::SetBit(..)
        | Strings::CountBits(_) => true,
        Strings::Get
        | Strings::Length
        | Strings::Range(..)
        | Strings::Set { .. }
        | Strings::GetDelete
        | Strings::GetExpire(_)
        | Strings::GetBit(_)
        | Strings::Add(_)
        | Strings::AddDecimal(_) => false,
    }
}

fn list_work(command: &Lists, slot: &Slot) -> usize {
    match command {
        Lists::Range(first, last) => {
            let length = slot.list().ok().flatten().map_or(0, std::collections::VecDeque::len);
            keys::span(*first, *last, length).len() * ELEMENT_BYTES
        }
        Lists::Trim(..) | Lists::Remove(..) | Lists::Find { .. } | Lists::Insert { .. } => {
            slot.cost()
        }
        Lists::Length | Lists::At(_) | Lists::Push(..) | Lists::Pop(..) | Lists::Set(..) => 0,
    }
}

/// The work of passing over all members of a sorted set in their order.
fn ordered(slot: &mut Slot) -> usize {
    slot.cost().saturating_mul(if slot.count_order() { 2 } else { 1 })
}

fn sorted_work(command: &Sorted, slot: &mut Slot) -> usize {
    match command {
        Sorted::CountIn(_) | Sorted::Rank(..) | Sorted::CountNames(_) => slot.cost(),
        Sorted::Random(count, _) => slot.cost().saturating_add(random::work(*count)),
        // The members are sorted once. A range of ranks is found in that order.
        Sorted::Range { span: Span::Ranks(first, last), .. } => {
            let length = slot.sorted().ok().flatten().map_or(0, crate::ordered::OrdMap::len);
            let order = if slot.count_order() { slot.cost() } else { 0 };
            order.saturating_add(keys::span(*first, *last, length).len() * ELEMENT_BYTES)
        }
        // All members are passed over.
        Sorted::Range { .. } | Sorted::RemoveRange(_) | Sorted::Pop(..) => ordered(slot),
        Sorted::Score(_)
        | Sorted::ScoreSeveral(_)
        | Sorted::Count
        | Sorted::Add(..)
        | Sorted::Increment(..)
        | Sorted::Remove(_) => 0,
    }
}
