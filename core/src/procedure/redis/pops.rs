//! `LMPOP` and `ZMPOP`: elements of the first key that has any.

use bytes::Bytes;

use super::lists::{self, End};
use super::parse::Args;
use super::reply::{Answer, Failure, Reply, SYNTAX};
use super::state::{Context, Slot};
use super::{Command, slot, sorted};
use crate::wire::Wire;

/// What is taken from a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Popped {
    /// Elements at an end of a list.
    Elements(End),
    /// The members of a sorted set with the lowest scores.
    Lowest,
    /// Those with the highest scores.
    Highest,
}

/// Takes elements from the first key that has any, and answers the name of this key with them.
pub(super) fn pop_first(
    slots: &mut [Slot],
    cx: Context,
    keys: &[(u32, Bytes)],
    popped: Popped,
    count: u64,
) -> Answer {
    for (key, name) in keys {
        let slot = slot(slots, *key)?;
        let taken = match popped {
            Popped::Elements(end) => elements(slot, cx, end, count)?,
            Popped::Lowest => members(slot, cx, false, count)?,
            Popped::Highest => members(slot, cx, true, count)?,
        };
        if !taken.is_empty() {
            return Ok(Reply::Array(vec![Reply::Bulk(name.clone()), Reply::Array(taken)]));
        }
    }
    Ok(Reply::NilArray)
}

fn elements(slot: &mut Slot, cx: Context, end: End, count: u64) -> Result<Vec<Reply>, Failure> {
    let mut taken = Vec::new();
    while (taken.len() as u64) < count {
        let Some(element) = lists::take(slot, cx, end)? else { break };
        taken.push(Reply::Bulk(element));
    }
    Ok(taken)
}

fn members(slot: &mut Slot, cx: Context, is_max: bool, count: u64) -> Result<Vec<Reply>, Failure> {
    let taken = sorted::pop(slot, cx, is_max, count)?.into_iter();
    let pair = |(score, name)| Reply::Array(vec![Reply::Bulk(name), Reply::Double(score)]);
    Ok(taken.map(pair).collect())
}

/// `LMPOP numkeys key [key …] LEFT | RIGHT [COUNT count]`, or `ZMPOP` with `MIN | MAX`.
pub(super) fn parse(args: &mut Args<'_>, words: [(&str, Popped); 2]) -> Result<Command, Failure> {
    let many = args.number_of_keys()?;
    if many >= args.left() {
        return Err(SYNTAX);
    }
    let mut keys = Vec::new();
    for _ in 0..many {
        keys.push(args.named_key()?);
    }
    let found = words.into_iter().find(|(word, _)| args.takes(word));
    let (_, popped) = found.ok_or(SYNTAX)?;
    let mut count = 1;
    if args.left() > 1 && args.takes("COUNT") {
        count = args.positive(Failure::new("ERR count should be greater than 0"))?;
    }
    Ok(Command::PopFirst(keys, popped, count as u64))
}
