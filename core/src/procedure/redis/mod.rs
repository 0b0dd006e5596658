//! Commands of the Redis protocol as a stored procedure: [`batch`] runs a list of commands on
//! several keys as one transaction.
//!
//! One key of Redis is one key of the database, and holds one encoded [`entry::Entry`]: a value
//! with its type, the time at which it expires, and a stamp of the transaction that changed it
//! last. A list of commands is a [`Batch`]. Whoever runs the batch, a gateway or every replica,
//! computes the same new entries. The gateway computes the answers from the values that the
//! transaction read ([`Batch::evaluate`]), with the same functions.
//!
//! A command that fails, for example because a key holds another type, changes nothing. The other
//! commands of its batch go on, as in Redis.
//!
//! **Expiry.** The gateway passes its time. A key that has expired by this time is absent for all
//! commands of the batch, and the batch removes it. So the first transaction that finds a key
//! expired removes the key, and the key never appears again. A batch that did not declare that it
//! writes such a key aborts; the gateway declares all its keys then, and tries again.
//!
//! **Watch.** A batch may require that keys still have the stamps that they had before. Otherwise
//! it aborts. A key that does not exist has no stamp, unless `WATCH` has noted one for it
//! ([`Command::Mark`]). Whoever makes the key drops the note.
//!
//! **Scripts.** A script is one command, too ([`script`]).
//!
//! **Messages.** `PUBLISH` writes the key of its channel ([`messages`]).

mod bits;
pub mod entry;
pub mod hashes;
pub mod keys;
pub mod lists;
pub mod merge;
pub mod messages;
pub mod number;
mod parse;
pub mod pops;
mod random;
pub mod reply;
pub mod script;
#[cfg(test)]
mod script_tests;
pub mod sets;
pub mod sorted;
mod state;
pub mod strings;
mod table;
#[cfg(test)]
mod tests;
mod work;

use bytes::Bytes;

pub use parse::{KeyLimits, KeyName, KeyNames, Refused, parse, wrong_arity};
pub use table::{COMMANDS, Spec};
pub use work::WORK_BYTES_MAX;

use super::{Call, Procedure, Results};
use crate::ordered::OrdMap;
use crate::txn::{AbortReason, Key, Value};
use crate::wire::{self, Wire};
use entry::{Content, Stamp};
use hashes::Hashes;
use keys::Keys;
use lists::{End, Lists};
use merge::Merge;
use number::Score;
use pops::Popped;
use reply::{Answer, Failure, Reply};
use script::Script;
use sets::{Combination, Sets};
use sorted::{Sorted, Span};
use state::{Context, Slot};
use strings::Strings;
use work::Meter;

/// What a command does with a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// It reads the key.
    Read,
    /// It reads and may change the key.
    Change,
    /// It sets the key, whatever the key holds.
    Replace,
}

/// A command on data. Keys are numbers in the list of keys of its batch.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Command {
    /// On one string.
    Strings(u32, Strings),
    /// On one key of any type.
    Keys(u32, Keys),
    /// On one hash.
    Hashes(u32, Hashes),
    /// On one set.
    Sets(u32, Sets),
    /// On one list.
    Lists(u32, Lists),
    /// On one sorted set.
    Sorted(u32, Sorted),
    /// `MGET`
    GetSeveral(Vec<u32>),
    /// `MSET`
    SetSeveral(Vec<(u32, Bytes)>),
    /// `MSETNX`
    SetSeveralIfAbsent(Vec<(u32, Bytes)>),
    /// `DEL`, `UNLINK`
    Delete(Vec<u32>),
    /// `EXISTS`
    Exists(Vec<u32>),
    /// `SINTER`, `SUNION`, `SDIFF`
    Combine(Combination, Vec<u32>),
    /// `SINTERSTORE`, `SUNIONSTORE`, `SDIFFSTORE`: the target first.
    CombineInto(Combination, u32, Vec<u32>),
    /// `SMOVE`: from one set to another.
    MoveMember(u32, u32, Bytes),
    /// `LMOVE`, `RPOPLPUSH`: from an end of one list to an end of another.
    MoveElement(u32, End, u32, End),
    /// `RENAME`, and `RENAMENX` if true.
    Rename(u32, u32, bool),
    /// `WATCH`: reads the stamps of keys.
    Watch(Vec<u32>),
    /// `WATCH` of keys that do not exist: notes this under a stamp of their own, so that `EXEC`
    /// finds out whether they were made and removed since.
    Mark(Vec<u32>),
    /// `EVAL` and its relatives.
    Script(Box<Script>),
    /// `PUBLISH`, `SPUBLISH`
    Publish {
        /// The key of the channel.
        channel: u32,
        /// When in its transaction the message is published: messages on several channels are
        /// delivered in this order.
        place: u32,
        /// The message.
        message: Bytes,
    },
    /// `COPY`: from one key to another, which it replaces if true.
    Copy(u32, u32, bool),
    /// `SINTERCARD`: the sets, and how many members it counts at most, 0 for all.
    CountShared(Vec<u32>, u64),
    /// `ZUNION`, `ZINTER`, `ZDIFF`, with the scores if true.
    Merge(Merge, bool),
    /// `ZUNIONSTORE`, `ZINTERSTORE`, `ZDIFFSTORE`: the target first.
    MergeInto(u32, Merge),
    /// `ZINTERCARD`: how many members it counts at most, 0 for all.
    CountMerged(Merge, u64),
    /// `ZRANGESTORE`
    RangeInto {
        /// The key that receives the members.
        target: u32,
        /// The sorted set.
        source: u32,
        /// Which members.
        span: Span,
        /// From the highest score to the lowest.
        is_reverse: bool,
        /// Members to leave out first, and most members to keep (all if negative).
        limit: Option<(i64, i64)>,
    },
    /// `LMPOP`, `ZMPOP`: keys with their names, what it takes from the first of them that has
    /// elements, and how many.
    PopFirst(Vec<(u32, Bytes)>, Popped, u64),
}

impl Command {
    /// Its keys, and what it does with each.
    #[must_use]
    pub fn uses(&self) -> Vec<(u32, Use)> {
        let all = |keys: &[u32], what| keys.iter().map(|key| (*key, what)).collect::<Vec<_>>();
        match self {
            Self::Strings(key, command) => vec![(*key, command.uses())],
            Self::Keys(key, command) => vec![(*key, command.uses())],
            Self::Hashes(key, command) => vec![(*key, command.uses())],
            Self::Sets(key, command) => vec![(*key, command.uses())],
            Self::Lists(key, command) => vec![(*key, command.uses())],
            Self::Sorted(key, command) => vec![(*key, command.uses())],
            Self::GetSeveral(keys)
            | Self::Exists(keys)
            | Self::Combine(_, keys)
            | Self::CountShared(keys, _)
            | Self::Watch(keys) => all(keys, Use::Read),
            Self::SetSeveral(pairs) => pairs.iter().map(|(key, _)| (*key, Use::Replace)).collect(),
            Self::SetSeveralIfAbsent(pairs) => {
                pairs.iter().map(|(key, _)| (*key, Use::Change)).collect()
            }
            Self::Delete(keys) | Self::Mark(keys) => all(keys, Use::Change),
            Self::CombineInto(_, target, keys) => {
                let mut uses = all(keys, Use::Read);
                uses.push((*target, Use::Change));
                uses
            }
            Self::MoveMember(from, to, _)
            | Self::MoveElement(from, _, to, _)
            | Self::Rename(from, to, _) => vec![(*from, Use::Change), (*to, Use::Change)],
            Self::Script(script) => script.uses(),
            Self::Publish { channel, .. } => vec![(*channel, Use::Replace)],
            Self::Copy(from, to, _) => vec![(*from, Use::Read), (*to, Use::Change)],
            Self::Merge(merge, _) | Self::CountMerged(merge, _) => all(&merge.keys, Use::Read),
            Self::MergeInto(target, merge) => {
                let mut uses = all(&merge.keys, Use::Read);
                uses.push((*target, Use::Change));
                uses
            }
            Self::RangeInto { target, source, .. } => {
                vec![(*source, Use::Read), (*target, Use::Change)]
            }
            Self::PopFirst(keys, ..) => keys.iter().map(|(key, _)| (*key, Use::Change)).collect(),
        }
    }

    /// True if it changes nothing.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.uses().iter().all(|(_, what)| *what == Use::Read)
    }
}

/// What a batch does with one key.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Wire)]
pub struct Access {
    /// It depends on the value.
    pub reads: bool,
    /// It may change the value.
    pub writes: bool,
}

/// A list of commands that run as one transaction.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Batch {
    /// The time of the gateway, in milliseconds since 1970.
    pub now_ms: u64,
    /// The transaction.
    pub stamp: Stamp,
    /// What the batch does with each key.
    pub keys: Vec<Access>,
    /// Keys that must have these stamps, or be absent.
    pub watched: Vec<(u32, Option<Stamp>)>,
    /// The commands.
    pub commands: Vec<Command>,
}

/// What a batch finds, computed from the values that it read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Evaluation {
    /// The answers to the commands.
    pub replies: Vec<Reply>,
    /// The stamp of each key before the commands; none if it has none or was not read.
    pub stamps: Vec<Option<Stamp>>,
    /// True if every watched key has the stamp that it must have.
    pub is_watch_kept: bool,
    /// True if a key has expired that the batch did not declare to write. Then nothing else here
    /// counts.
    pub needs_more_writes: bool,
    /// True if the commands are more work than a transaction may do. Then there are no answers.
    pub is_too_large: bool,
}

/// How long a note is kept that a watched key does not exist, in milliseconds. When it is gone,
/// `EXEC` does nothing, as if the key had changed.
const MARK_MS: u64 = 600_000;

/// The answer instead of one that does not fit.
const OMITTED: Failure = Failure::new(
    "ERR the answers of this transaction are larger than limits.response_bytes_max; this one is \
     left out, and the command took effect",
);

impl Batch {
    /// A batch of these commands on `keys` keys. If it is wide, it declares that it may write all
    /// of them.
    #[must_use]
    pub fn new(
        keys: usize,
        commands: Vec<Command>,
        watched: Vec<(u32, Option<Stamp>)>,
        is_wide: bool,
    ) -> Self {
        let mut uses: Vec<(Option<Use>, Access)> = vec![(None, Access::default()); keys];
        let watches = watched.iter().map(|(key, _)| (*key, Use::Read));
        for (key, what) in watches.chain(commands.iter().flat_map(Command::uses)) {
            let Some((first, access)) = uses.get_mut(key as usize) else { continue };
            // What follows a replacement does not depend on the value before.
            access.reads |= what != Use::Replace && *first != Some(Use::Replace);
            access.writes |= what != Use::Read;
            first.get_or_insert(what);
        }
        let keys = uses.into_iter().map(|(first, access)| Access {
            writes: access.writes || (is_wide && first.is_some()),
            ..access
        });
        let (now_ms, stamp, keys) = (0, Stamp::default(), keys.collect());
        Self { now_ms, stamp, keys, watched, commands }
    }

    /// True if it writes nothing.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.keys.iter().all(|access| !access.writes)
    }

    /// The call that runs it. `names` are the names of its keys in the database.
    #[must_use]
    pub fn call(&self, names: &[Key]) -> Call {
        let of = |is_wanted: fn(&Access) -> bool| -> Vec<Key> {
            let named = names.iter().zip(&self.keys);
            named.filter(|(_, access)| is_wanted(access)).map(|(name, _)| name.clone()).collect()
        };
        Call {
            procedure: Procedure::RedisBatch,
            reads: of(|access| access.reads),
            writes: of(|access| access.writes),
            arguments: Value(wire::encode(self)),
        }
    }

    /// Computes the answers from the values read, which `value` returns by the number of the key.
    /// Answers beyond `bytes_max` bytes are replaced by errors.
    pub fn evaluate(&self, value: impl Fn(usize) -> Option<Value>, bytes_max: usize) -> Evaluation {
        let cx = self.context();
        let read = |(key, access): (usize, &Access)| {
            Slot::new(access.reads.then(|| value(key)).flatten(), cx)
        };
        let mut slots: Vec<Slot> = self.keys.iter().enumerate().map(read).collect();
        let stamps: Vec<_> = slots.iter().map(Slot::stamp).collect();
        let mut all = slots.iter().zip(&self.keys);
        let needs_more_writes = all.any(|(slot, access)| slot.is_changed() && !access.writes);
        let is_watch_kept = self.is_watch_kept(&slots);
        let mut left = bytes_max;
        let mut replies = Vec::new();
        let mut meter = Meter::new();
        let mut is_too_large = false;
        for command in &self.commands {
            let Ok(answer) = metered(command, &mut slots, cx, &mut meter) else {
                is_too_large = true;
                replies.clear();
                break;
            };
            let reply = answer.unwrap_or_else(Reply::Error);
            let bytes = reply.bytes();
            let fits = bytes <= left;
            left = left.saturating_sub(bytes);
            replies.push(if fits { reply } else { Reply::Error(OMITTED) });
        }
        Evaluation { replies, stamps, is_watch_kept, needs_more_writes, is_too_large }
    }

    fn context(&self) -> Context {
        Context { now_ms: self.now_ms, stamp: self.stamp }
    }

    fn is_watch_kept(&self, slots: &[Slot]) -> bool {
        self.watched
            .iter()
            .all(|(key, stamp)| slots.get(*key as usize).is_some_and(|slot| slot.stamp() == *stamp))
    }

    /// True if its commands name only keys that it has.
    fn is_consistent(&self) -> bool {
        let mut uses = self.commands.iter().flat_map(Command::uses);
        uses.all(|(key, _)| (key as usize) < self.keys.len())
    }
}

/// Runs a batch. Reads and writes the keys that it declares, in the order of its list; the
/// argument is the encoded [`Batch`].
///
/// # Errors
/// A guard: a watched key has changed, a key has expired that the batch did not declare to write,
/// or the argument has the wrong form. Too large: the commands are more work than
/// [`WORK_BYTES_MAX`].
pub fn batch(reads: &[Option<Value>], arguments: &Value) -> Results {
    let batch: Batch = wire::decode(&arguments.0).map_err(|_| AbortReason::Guard)?;
    let count = batch.keys.iter().filter(|access| access.reads).count();
    if count != reads.len() || batch.commands.is_empty() || !batch.is_consistent() {
        return Err(AbortReason::Guard);
    }
    let cx = batch.context();
    let mut reads = reads.iter().cloned();
    let read =
        |access: &Access| Slot::new(access.reads.then(|| reads.next().flatten()).flatten(), cx);
    let mut slots: Vec<Slot> = batch.keys.iter().map(read).collect();
    if !batch.is_watch_kept(&slots) {
        return Err(AbortReason::Guard);
    }
    let mut meter = Meter::new();
    for command in &batch.commands {
        // A gateway runs all of them, so all are counted. How much a script does is known when it
        // has run.
        if command.is_read_only() && !matches!(command, Command::Script(_)) {
            meter.charge(command, &mut slots)?;
        } else {
            // A command that fails has no effect; its gateway answers with the error.
            let _ = metered(command, &mut slots, cx, &mut meter)?;
        }
    }
    let mut results = Vec::new();
    for (slot, access) in slots.into_iter().zip(&batch.keys) {
        if access.writes {
            results.push(slot.into_value());
        } else if slot.is_changed() {
            return Err(AbortReason::Guard);
        }
    }
    Ok(results)
}

/// A command that names a key that its batch does not have. [`Batch::is_consistent`] excludes it.
const NO_SUCH_KEY: Failure = Failure::new("ERR the command names a key that its batch lacks");

fn slot(slots: &mut [Slot], key: u32) -> Result<&mut Slot, Failure> {
    slots.get_mut(key as usize).ok_or(NO_SUCH_KEY)
}

/// Counts the work of a command, and runs it.
fn metered(
    command: &Command,
    slots: &mut [Slot],
    cx: Context,
    meter: &mut Meter,
) -> Result<Answer, AbortReason> {
    if let Command::Script(script) = command {
        return script.run(slots, cx, meter);
    }
    meter.charge(command, slots)?;
    Ok(execute(command, slots, cx))
}

fn execute(command: &Command, slots: &mut [Slot], cx: Context) -> Answer {
    match command {
        Command::Strings(key, command) => command.execute(slot(slots, *key)?, cx),
        Command::Keys(key, command) => command.execute(slot(slots, *key)?, cx),
        Command::Hashes(key, command) => command.execute(slot(slots, *key)?, cx),
        Command::Sets(key, command) => command.execute(slot(slots, *key)?, cx),
        Command::Lists(key, command) => command.execute(slot(slots, *key)?, cx),
        Command::Sorted(key, command) => command.execute(slot(slots, *key)?, cx),
        Command::GetSeveral(keys) => {
            // A key of another type counts as absent, as in Redis.
            let get = |key: &u32| {
                slots
                    .get(*key as usize)
                    .map_or(Reply::Nil, |slot| Reply::bulk_or_nil(slot.string().ok().flatten()))
            };
            Ok(Reply::Array(keys.iter().map(get).collect()))
        }
        Command::SetSeveral(pairs) => set_several(slots, cx, pairs).map(|()| Reply::OK),
        Command::SetSeveralIfAbsent(pairs) => {
            let exists = |key: &u32| slots.get(*key as usize).is_some_and(Slot::exists);
            if pairs.iter().any(|(key, _)| exists(key)) {
                return Ok(Reply::Integer(0));
            }
            set_several(slots, cx, pairs).map(|()| Reply::Integer(1))
        }
        Command::Delete(keys) => {
            let mut gone = 0;
            for key in keys {
                gone += usize::from(slot(slots, *key)?.remove());
            }
            Ok(Reply::count(gone))
        }
        Command::Exists(keys) => {
            let exists = |key: &&u32| slots.get(**key as usize).is_some_and(Slot::exists);
            Ok(Reply::count(keys.iter().filter(exists).count()))
        }
        Command::Combine(how, keys) => {
            let sets = sets_of(slots, keys)?;
            Ok(sets::as_set(how.of(sets.into_iter())))
        }
        Command::CombineInto(how, target, keys) => combine_into(slots, cx, *how, *target, keys),
        Command::MoveMember(from, to, member) => move_member(slots, cx, *from, *to, member),
        Command::MoveElement(from, from_end, to, to_end) => {
            move_element(slots, cx, (*from, *from_end), (*to, *to_end))
        }
        Command::Rename(from, to, only_if_absent) => rename(slots, cx, *from, *to, *only_if_absent),
        Command::Watch(_) => Ok(Reply::OK),
        Command::Mark(keys) => {
            for key in keys {
                slot(slots, *key)?.mark(cx.now_ms.saturating_add(MARK_MS), cx);
            }
            Ok(Reply::OK)
        }
        Command::Script(_) => Err(NO_SCRIPT_INSIDE),
        Command::Publish { channel, place, message } => {
            messages::publish(slot(slots, *channel)?, cx, *place, message)
        }
        Command::Copy(from, to, is_replacing) => copy(slots, cx, *from, *to, *is_replacing),
        Command::CountShared(keys, limit) => {
            let shared = Combination::Intersection.of(sets_of(slots, keys)?.into_iter());
            Ok(Reply::count(merge::limited(shared.len(), *limit)))
        }
        Command::Merge(merge, has_scores) => {
            let members = merge.members(slots)?.into_iter();
            let mut members: Vec<_> = members.map(|(name, score)| (score, name)).collect();
            members.sort_unstable();
            Ok(sorted::listed(members, *has_scores))
        }
        Command::MergeInto(target, merge) => {
            let members = merge.members(slots)?;
            store(slot(slots, *target)?, cx, members)
        }
        Command::CountMerged(merge, limit) => {
            Ok(Reply::count(merge::limited(merge.members(slots)?.len(), *limit)))
        }
        Command::RangeInto { target, source, span, is_reverse, limit } => {
            let chosen = sorted::select(slot(slots, *source)?, span, *is_reverse, *limit)?;
            let members = chosen.into_iter().map(|(score, name)| (name, score)).collect();
            store(slot(slots, *target)?, cx, members)
        }
        Command::PopFirst(keys, popped, count) => pops::pop_first(slots, cx, keys, *popped, *count),
    }
}

/// A script that another one gives. Scripts are refused before.
const NO_SCRIPT_INSIDE: Failure = Failure::new("ERR a script cannot run another one");

fn set_several(slots: &mut [Slot], cx: Context, pairs: &[(u32, Bytes)]) -> Result<(), Failure> {
    for (key, value) in pairs {
        slot(slots, *key)?.replace(Content::String(value.clone()), 0, cx);
    }
    Ok(())
}

type SetOf<'a> = Option<&'a crate::ordered::OrdSet<Bytes>>;

fn sets_of<'a>(slots: &'a [Slot], keys: &[u32]) -> Result<Vec<SetOf<'a>>, Failure> {
    let set = |key: &u32| slots.get(*key as usize).ok_or(NO_SUCH_KEY)?.set();
    keys.iter().map(set).collect()
}

fn combine_into(
    slots: &mut [Slot],
    cx: Context,
    how: Combination,
    target: u32,
    keys: &[u32],
) -> Answer {
    let members = how.of(sets_of(slots, keys)?.into_iter()).into_iter().cloned().collect();
    let content = Content::Set(members);
    let target = slot(slots, target)?;
    if content.is_vacant() {
        target.remove();
        return Ok(Reply::Integer(0));
    }
    if content.cost() > entry::COST_MAX {
        return Err(reply::TOO_LARGE);
    }
    target.replace(content, 0, cx);
    Ok(Reply::count(target.set()?.map_or(0, crate::ordered::OrdSet::len)))
}

/// Replaces a key by these members; removes it if there are none.
fn store(target: &mut Slot, cx: Context, members: OrdMap<Bytes, Score>) -> Answer {
    let many = members.len();
    let content = Content::Sorted(members);
    if content.is_vacant() {
        target.remove();
        return Ok(Reply::Integer(0));
    }
    if content.cost() > entry::COST_MAX {
        return Err(reply::TOO_LARGE);
    }
    target.replace(content, 0, cx);
    Ok(Reply::count(many))
}

fn copy(slots: &mut [Slot], cx: Context, from: u32, to: u32, is_replacing: bool) -> Answer {
    let source = slot(slots, from)?;
    let Some(expires_ms) = source.expires_ms() else { return Ok(Reply::Integer(0)) };
    let content = source.content().cloned();
    let target = slot(slots, to)?;
    if target.exists() && !is_replacing {
        return Ok(Reply::Integer(0));
    }
    target.replace(content.ok_or(reply::WRONG_TYPE)?, expires_ms, cx);
    Ok(Reply::Integer(1))
}

fn move_member(slots: &mut [Slot], cx: Context, from: u32, to: u32, member: &Bytes) -> Answer {
    let Some(members) = slot(slots, from)?.set()? else { return Ok(Reply::Integer(0)) };
    let is_member = members.contains(member);
    slot(slots, to)?.set()?;
    if !is_member {
        return Ok(Reply::Integer(0));
    }
    if from != to {
        slot(slots, to)?.check_room(entry::cost_of([member]))?;
        let one = vec![member.clone()];
        Sets::Remove(one.clone()).execute(slot(slots, from)?, cx)?;
        Sets::Add(one).execute(slot(slots, to)?, cx)?;
    }
    Ok(Reply::Integer(1))
}

fn move_element(
    slots: &mut [Slot],
    cx: Context,
    (from, from_end): (u32, End),
    (to, to_end): (u32, End),
) -> Answer {
    let Some(list) = slot(slots, from)?.list()? else { return Ok(Reply::Nil) };
    let element = match from_end {
        End::Left => list.front(),
        End::Right => list.back(),
    };
    let Some(element) = element.cloned() else { return Ok(Reply::Nil) };
    slot(slots, to)?.list()?;
    if from == to {
        // Never empty in between: an empty list would be a new one, without its lifetime.
        lists::rotate(slot(slots, from)?, cx, from_end, to_end)?;
        return Ok(Reply::Bulk(element));
    }
    slot(slots, to)?.check_room(entry::cost_of([&element]))?;
    lists::take(slot(slots, from)?, cx, from_end)?;
    lists::push(slot(slots, to)?, cx, to_end, std::slice::from_ref(&element))?;
    Ok(Reply::Bulk(element))
}

fn rename(slots: &mut [Slot], cx: Context, from: u32, to: u32, only_if_absent: bool) -> Answer {
    if !slot(slots, from)?.exists() {
        return Err(Failure::new("ERR no such key"));
    }
    if only_if_absent && slot(slots, to)?.exists() {
        return Ok(Reply::Integer(0));
    }
    if from != to {
        let source = slot(slots, from)?;
        let expires_ms = source.expires_ms().unwrap_or(0);
        let content = source.content().cloned().ok_or(reply::WRONG_TYPE)?;
        source.remove();
        slot(slots, to)?.replace(content, expires_ms, cx);
    }
    Ok(if only_if_absent { Reply::Integer(1) } else { Reply::OK })
}
