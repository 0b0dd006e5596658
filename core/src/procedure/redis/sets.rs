//! Commands on sets.

use bytes::Bytes;

use super::entry::{Stamp, cost_of};
use super::reply::{Answer, Reply};
use super::state::{Context, Slot};
use super::{Use, random};
use crate::ordered::OrdSet;
use crate::wire::Wire;

/// A command on one set.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Sets {
    /// `SMEMBERS`
    Members,
    /// `SISMEMBER`
    Has(Bytes),
    /// `SMISMEMBER`
    HasSeveral(Vec<Bytes>),
    /// `SCARD`
    Count,
    /// `SADD`
    Add(Vec<Bytes>),
    /// `SREM`
    Remove(Vec<Bytes>),
    /// `SPOP`, of one member or of several.
    Pop(Option<u64>),
    /// `SRANDMEMBER`, of one member or of several.
    Random(Option<i64>),
}

impl Sets {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Members | Self::Has(_) | Self::HasSeveral(_) | Self::Count | Self::Random(_) => {
                Use::Read
            }
            Self::Add(_) | Self::Remove(_) | Self::Pop(_) => Use::Change,
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        let members = slot.set()?;
        let has = |name: &Bytes| members.is_some_and(|members| members.contains(name));
        match self {
            Self::Members => Ok(as_set(members.into_iter().flatten())),
            Self::Has(name) => Ok(Reply::flag(has(name))),
            Self::HasSeveral(names) => {
                Ok(Reply::Array(names.iter().map(|name| Reply::flag(has(name))).collect()))
            }
            Self::Count => Ok(Reply::count(members.map_or(0, OrdSet::len))),
            Self::Add(names) => {
                slot.check_room(cost_of(names))?;
                let (members, cost) = slot.set_mut()?;
                let mut new = 0;
                for name in names {
                    if members.insert(name.clone()) {
                        *cost += cost_of([name]);
                        new += 1;
                    }
                }
                if new > 0 {
                    slot.changed(cx);
                }
                Ok(Reply::count(new))
            }
            Self::Remove(names) => {
                if members.is_none() {
                    return Ok(Reply::Integer(0));
                }
                let (members, cost) = slot.set_mut()?;
                let mut gone = 0;
                for name in names {
                    if members.remove(name) {
                        *cost = cost.saturating_sub(cost_of([name]));
                        gone += 1;
                    }
                }
                if gone > 0 {
                    slot.changed(cx);
                }
                Ok(Reply::count(gone))
            }
            Self::Pop(count) => pop(slot, cx, *count),
            Self::Random(None) => {
                let one = members.and_then(|members| random::one(cx.stamp, members.iter()));
                Ok(Reply::bulk_or_nil(one))
            }
            Self::Random(Some(count)) => {
                let all: Vec<&Bytes> = members.into_iter().flatten().collect();
                Ok(Reply::bulks(random::choose(cx.stamp, *count, all)))
            }
        }
    }
}

/// These members as a reply.
pub(super) fn as_set<'a>(members: impl IntoIterator<Item = &'a Bytes>) -> Reply {
    Reply::Set(members.into_iter().cloned().map(Reply::Bulk).collect())
}

/// Removes some members. Which ones depends on the transaction, and is the same at every replica.
fn pop(slot: &mut Slot, cx: Context, count: Option<u64>) -> Answer {
    let nothing = if count.is_some() { Reply::Set(Vec::new()) } else { Reply::Nil };
    let many = usize::try_from(count.unwrap_or(1)).unwrap_or(usize::MAX);
    if slot.set()?.is_none() || many == 0 {
        return Ok(nothing);
    }
    let (members, cost) = slot.set_mut()?;
    let many = many.min(members.len());
    let first = place(cx.stamp, members.len() - many + 1);
    let taken: Vec<Bytes> = members.iter().skip(first).take(many).cloned().collect();
    for name in &taken {
        members.remove(name);
    }
    *cost = cost.saturating_sub(cost_of(&taken));
    slot.changed(cx);
    Ok(match count {
        Some(_) => as_set(&taken),
        None => taken.into_iter().next().map_or(Reply::Nil, Reply::Bulk),
    })
}

/// A number below `bound` that depends on the transaction.
fn place(stamp: Stamp, bound: usize) -> usize {
    let mixed = (stamp.client ^ stamp.counter.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    usize::try_from((mixed >> 32) % bound.max(1) as u64).unwrap_or(0)
}

/// How several sets become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Combination {
    /// Members of all of them: `SINTER`.
    Intersection,
    /// Members of any of them: `SUNION`.
    Union,
    /// Members of the first and of no other: `SDIFF`.
    Difference,
}

impl Combination {
    /// Combines sets; a missing one has no members.
    pub(super) fn of<'a>(
        self,
        mut sets: impl Iterator<Item = Option<&'a OrdSet<Bytes>>>,
    ) -> OrdSet<&'a Bytes> {
        let first = sets.next().flatten();
        let mut result: OrdSet<&Bytes> = first.into_iter().flatten().collect();
        for set in sets {
            match self {
                Self::Intersection => {
                    result.retain(|name| set.is_some_and(|set| set.contains(*name)));
                }
                Self::Union => result.extend(set.into_iter().flatten()),
                Self::Difference => {
                    result.retain(|name| !set.is_some_and(|set| set.contains(*name)));
                }
            }
        }
        result
    }
}
