//! Every command on data: its name, how many words it has, and how to read them.

use super::Command;
use super::bits;
use super::entry::{COST_MAX, cost_of};
use super::hashes::Hashes;
use super::keys::{self, Keys};
use super::lists::{self, End, Lists};
use super::merge;
use super::messages::{self, CHANNELS, SHARD_CHANNELS};
use super::parse::Args;
use super::pops::{self, Popped};
use super::random;
use super::reply::{Failure, OVERFLOW, SYNTAX, TOO_LARGE};
use super::script;
use super::sets::{Combination, Sets};
use super::sorted::{self, Sorted, Span};
use super::strings::{self, Condition, Lifetime, SetAnswer, Strings};

/// A command on data.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its name, in lower case.
    pub name: &'static str,
    /// The number of words, the name included; the smallest number if it is negative.
    pub arity: i64,
    /// True if it changes nothing.
    pub is_read_only: bool,
    /// The positions of its keys: the first, the last (negative from the end), and the step. All 0
    /// if the second argument is the number of keys, which follow it, or if it has a channel
    /// instead.
    pub keys: (i64, i64, i64),
    pub(super) parse: Parse,
}

/// Reads the words after the name.
type Parse = fn(&mut Args<'_>) -> Result<Command, Failure>;

const READ: bool = true;
const WRITE: bool = false;
const ONE: (i64, i64, i64) = (1, 1, 1);
const SECOND: (i64, i64, i64) = (2, 2, 1);
const TWO: (i64, i64, i64) = (1, 2, 1);
const ALL: (i64, i64, i64) = (1, -1, 1);
const PAIRS: (i64, i64, i64) = (1, -1, 2);
const COUNTED: (i64, i64, i64) = (0, 0, 0);
const CHANNEL: (i64, i64, i64) = (0, 0, 0);

const fn row(
    name: &'static str,
    arity: i64,
    is_read_only: bool,
    keys: (i64, i64, i64),
    parse: Parse,
) -> Spec {
    Spec { name, arity, is_read_only, keys, parse }
}

/// All commands on data.
pub const COMMANDS: &[Spec] = &[
    // Strings.
    row("get", 2, READ, ONE, |args| Ok(Command::Strings(args.key()?, Strings::Get))),
    row("set", -3, WRITE, ONE, |args| fitting(strings::parse_set(args)?)),
    row("setnx", 3, WRITE, ONE, |args| set(args, Condition::IfAbsent, SetAnswer::Flag)),
    row("getset", 3, WRITE, ONE, |args| set(args, Condition::Always, SetAnswer::Old)),
    row("setex", 4, WRITE, ONE, |args| set_for(args, true)),
    row("psetex", 4, WRITE, ONE, |args| set_for(args, false)),
    row("getdel", 2, WRITE, ONE, |args| Ok(Command::Strings(args.key()?, Strings::GetDelete))),
    row("getex", -2, WRITE, ONE, |args| {
        let (key, command) = strings::parse_get_expire(args)?;
        Ok(Command::Strings(key, command))
    }),
    row("append", 3, WRITE, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::Append(args.bytes()?)))
    }),
    row("strlen", 2, READ, ONE, |args| Ok(Command::Strings(args.key()?, Strings::Length))),
    row("getrange", 4, READ, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::Range(args.integer()?, args.integer()?)))
    }),
    row("substr", 4, READ, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::Range(args.integer()?, args.integer()?)))
    }),
    row("setrange", 4, WRITE, ONE, |args| {
        let (key, offset) = (args.key()?, args.integer()?);
        let offset =
            u64::try_from(offset).map_err(|_| Failure::new("ERR offset is out of range"))?;
        Ok(Command::Strings(key, Strings::SetRange(offset, args.bytes()?)))
    }),
    row("mget", -2, READ, ALL, |args| Ok(Command::GetSeveral(args.all_keys()?))),
    row("mset", -3, WRITE, PAIRS, |args| Ok(Command::SetSeveral(several(args)?))),
    row("msetnx", -3, WRITE, PAIRS, |args| Ok(Command::SetSeveralIfAbsent(several(args)?))),
    row("getbit", 3, READ, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::GetBit(bits::parse_offset(args)?)))
    }),
    row("setbit", 4, WRITE, ONE, |args| {
        let (key, offset) = (args.key()?, bits::parse_offset(args)?);
        Ok(Command::Strings(key, Strings::SetBit(offset, bits::parse_bit(args)?)))
    }),
    row("bitcount", -2, READ, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::CountBits(args.all())))
    }),
    // Counters.
    row("incr", 2, WRITE, ONE, |args| Ok(Command::Strings(args.key()?, Strings::Add(1)))),
    row("decr", 2, WRITE, ONE, |args| Ok(Command::Strings(args.key()?, Strings::Add(-1)))),
    row("incrby", 3, WRITE, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::Add(args.integer()?)))
    }),
    row("decrby", 3, WRITE, ONE, |args| {
        let (key, amount) = (args.key()?, args.integer()?);
        Ok(Command::Strings(key, Strings::Add(amount.checked_neg().ok_or(OVERFLOW)?)))
    }),
    row("incrbyfloat", 3, WRITE, ONE, |args| {
        Ok(Command::Strings(args.key()?, Strings::AddDecimal(args.bytes()?)))
    }),
    // Keys of any type.
    row("del", -2, WRITE, ALL, |args| Ok(Command::Delete(args.all_keys()?))),
    row("unlink", -2, WRITE, ALL, |args| Ok(Command::Delete(args.all_keys()?))),
    row("exists", -2, READ, ALL, |args| Ok(Command::Exists(args.all_keys()?))),
    row("touch", -2, READ, ALL, |args| Ok(Command::Exists(args.all_keys()?))),
    row("copy", -3, WRITE, TWO, |args| {
        let (from, to, is_replacing) = keys::parse_copy(args)?;
        Ok(Command::Copy(from, to, is_replacing))
    }),
    row("object", -2, READ, SECOND, |args| {
        let (key, command) = keys::parse_object(args)?;
        Ok(Command::Keys(key, command))
    }),
    row("type", 2, READ, ONE, |args| Ok(Command::Keys(args.key()?, Keys::Type))),
    row("rename", 3, WRITE, TWO, |args| Ok(Command::Rename(args.key()?, args.key()?, false))),
    row("renamenx", 3, WRITE, TWO, |args| Ok(Command::Rename(args.key()?, args.key()?, true))),
    row("expire", -3, WRITE, ONE, |args| expire(args, true, false)),
    row("pexpire", -3, WRITE, ONE, |args| expire(args, false, false)),
    row("expireat", -3, WRITE, ONE, |args| expire(args, true, true)),
    row("pexpireat", -3, WRITE, ONE, |args| expire(args, false, true)),
    row("persist", 2, WRITE, ONE, |args| Ok(Command::Keys(args.key()?, Keys::Persist))),
    row("ttl", 2, READ, ONE, |args| remaining(args, true, false)),
    row("pttl", 2, READ, ONE, |args| remaining(args, false, false)),
    row("expiretime", 2, READ, ONE, |args| remaining(args, true, true)),
    row("pexpiretime", 2, READ, ONE, |args| remaining(args, false, true)),
    // Hashes.
    row("hset", -4, WRITE, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::Set(args.pairs()?, false)))
    }),
    row("hmset", -4, WRITE, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::Set(args.pairs()?, true)))
    }),
    row("hsetnx", 4, WRITE, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::SetIfAbsent(args.bytes()?, args.bytes()?)))
    }),
    row("hget", 3, READ, ONE, |args| Ok(Command::Hashes(args.key()?, Hashes::Get(args.bytes()?)))),
    row("hmget", -3, READ, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::GetSeveral(args.all())))
    }),
    row("hgetall", 2, READ, ONE, |args| Ok(Command::Hashes(args.key()?, Hashes::All))),
    row("hkeys", 2, READ, ONE, |args| Ok(Command::Hashes(args.key()?, Hashes::Fields))),
    row("hvals", 2, READ, ONE, |args| Ok(Command::Hashes(args.key()?, Hashes::Values))),
    row("hlen", 2, READ, ONE, |args| Ok(Command::Hashes(args.key()?, Hashes::Length))),
    row("hexists", 3, READ, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::Has(args.bytes()?)))
    }),
    row("hstrlen", 3, READ, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::ValueLength(args.bytes()?)))
    }),
    row("hdel", -3, WRITE, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::Delete(args.all())))
    }),
    row("hincrby", 4, WRITE, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::Add(args.bytes()?, args.integer()?)))
    }),
    row("hincrbyfloat", 4, WRITE, ONE, |args| {
        Ok(Command::Hashes(args.key()?, Hashes::AddDecimal(args.bytes()?, args.decimal()?)))
    }),
    row("hrandfield", -2, READ, ONE, |args| {
        let (key, (count, has_values)) = (args.key()?, random::parse(args, Some("WITHVALUES"))?);
        Ok(Command::Hashes(key, Hashes::Random(count, has_values)))
    }),
    // Sets.
    row("sadd", -3, WRITE, ONE, |args| Ok(Command::Sets(args.key()?, Sets::Add(args.all())))),
    row("srem", -3, WRITE, ONE, |args| Ok(Command::Sets(args.key()?, Sets::Remove(args.all())))),
    row("smembers", 2, READ, ONE, |args| Ok(Command::Sets(args.key()?, Sets::Members))),
    row("sismember", 3, READ, ONE, |args| Ok(Command::Sets(args.key()?, Sets::Has(args.bytes()?)))),
    row("smismember", -3, READ, ONE, |args| {
        Ok(Command::Sets(args.key()?, Sets::HasSeveral(args.all())))
    }),
    row("scard", 2, READ, ONE, |args| Ok(Command::Sets(args.key()?, Sets::Count))),
    row("spop", -2, WRITE, ONE, |args| {
        Ok(Command::Sets(args.key()?, Sets::Pop(optional_count(args)?)))
    }),
    row("srandmember", -2, READ, ONE, |args| {
        let (key, (count, _)) = (args.key()?, random::parse(args, None)?);
        Ok(Command::Sets(key, Sets::Random(count)))
    }),
    row("smove", 4, WRITE, TWO, |args| {
        Ok(Command::MoveMember(args.key()?, args.key()?, args.bytes()?))
    }),
    row("sinter", -2, READ, ALL, |args| combine(args, Combination::Intersection)),
    row("sunion", -2, READ, ALL, |args| combine(args, Combination::Union)),
    row("sdiff", -2, READ, ALL, |args| combine(args, Combination::Difference)),
    row("sinterstore", -3, WRITE, ALL, |args| combine_into(args, Combination::Intersection)),
    row("sunionstore", -3, WRITE, ALL, |args| combine_into(args, Combination::Union)),
    row("sdiffstore", -3, WRITE, ALL, |args| combine_into(args, Combination::Difference)),
    row("sintercard", -3, READ, COUNTED, |args| {
        let (keys, limit) = merge::parse_set_count(args)?;
        Ok(Command::CountShared(keys, limit))
    }),
    // Sorted sets.
    row("zadd", -4, WRITE, ONE, |args| sorted(sorted::parse_add(args)?)),
    row("zincrby", 4, WRITE, ONE, |args| sorted(sorted::parse_increment(args)?)),
    row("zscore", 3, READ, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::Score(args.bytes()?)))
    }),
    row("zmscore", -3, READ, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::ScoreSeveral(args.all())))
    }),
    row("zcard", 2, READ, ONE, |args| Ok(Command::Sorted(args.key()?, Sorted::Count))),
    row("zcount", 4, READ, ONE, |args| {
        let key = args.key()?;
        Ok(Command::Sorted(key, Sorted::CountIn(sorted::parse_interval(args, false)?)))
    }),
    row("zrank", 3, READ, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::Rank(args.bytes()?, false)))
    }),
    row("zrevrank", 3, READ, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::Rank(args.bytes()?, true)))
    }),
    row("zrange", -4, READ, ONE, |args| sorted(sorted::parse_range(args)?)),
    row("zrevrange", -4, READ, ONE, |args| sorted(sorted::parse_reverse_range(args)?)),
    row("zrangebyscore", -4, READ, ONE, |args| sorted(sorted::parse_range_by_score(args, false)?)),
    row("zrevrangebyscore", -4, READ, ONE, |args| {
        sorted(sorted::parse_range_by_score(args, true)?)
    }),
    row("zrem", -3, WRITE, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::Remove(args.all())))
    }),
    row("zremrangebyrank", 4, WRITE, ONE, |args| {
        let (key, span) = (args.key()?, Span::Ranks(args.integer()?, args.integer()?));
        Ok(Command::Sorted(key, Sorted::RemoveRange(span)))
    }),
    row("zremrangebyscore", 4, WRITE, ONE, |args| {
        let key = args.key()?;
        let span = Span::Scores(sorted::parse_interval(args, false)?);
        Ok(Command::Sorted(key, Sorted::RemoveRange(span)))
    }),
    row("zpopmin", -2, WRITE, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::Pop(false, optional_count(args)?)))
    }),
    row("zpopmax", -2, WRITE, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::Pop(true, optional_count(args)?)))
    }),
    row("zmpop", -4, WRITE, COUNTED, |args| {
        pops::parse(args, [("MIN", Popped::Lowest), ("MAX", Popped::Highest)])
    }),
    row("zrandmember", -2, READ, ONE, |args| {
        let (key, (count, has_scores)) = (args.key()?, random::parse(args, Some("WITHSCORES"))?);
        Ok(Command::Sorted(key, Sorted::Random(count, has_scores)))
    }),
    row("zlexcount", 4, READ, ONE, |args| {
        Ok(Command::Sorted(args.key()?, Sorted::CountNames(sorted::parse_names(args)?)))
    }),
    row("zrangebylex", -4, READ, ONE, |args| sorted(sorted::parse_range_by_name(args, false)?)),
    row("zrevrangebylex", -4, READ, ONE, |args| sorted(sorted::parse_range_by_name(args, true)?)),
    row("zremrangebylex", 4, WRITE, ONE, |args| {
        let (key, span) = (args.key()?, Span::Names(sorted::parse_names(args)?));
        Ok(Command::Sorted(key, Sorted::RemoveRange(span)))
    }),
    row("zrangestore", -5, WRITE, TWO, sorted::parse_range_into),
    row("zunion", -3, READ, COUNTED, |args| merged(args, Combination::Union)),
    row("zinter", -3, READ, COUNTED, |args| merged(args, Combination::Intersection)),
    row("zdiff", -3, READ, COUNTED, |args| merged(args, Combination::Difference)),
    row("zunionstore", -4, WRITE, ONE, |args| merged_into(args, Combination::Union)),
    row("zinterstore", -4, WRITE, ONE, |args| merged_into(args, Combination::Intersection)),
    row("zdiffstore", -4, WRITE, ONE, |args| merged_into(args, Combination::Difference)),
    row("zintercard", -3, READ, COUNTED, |args| {
        let (merge, limit) = merge::parse_count(args)?;
        Ok(Command::CountMerged(merge, limit))
    }),
    // Lists.
    row("lpush", -3, WRITE, ONE, |args| push(args, End::Left, false)),
    row("rpush", -3, WRITE, ONE, |args| push(args, End::Right, false)),
    row("lpushx", -3, WRITE, ONE, |args| push(args, End::Left, true)),
    row("rpushx", -3, WRITE, ONE, |args| push(args, End::Right, true)),
    row("lpop", -2, WRITE, ONE, |args| {
        Ok(Command::Lists(args.key()?, Lists::Pop(End::Left, optional_count(args)?)))
    }),
    row("rpop", -2, WRITE, ONE, |args| {
        Ok(Command::Lists(args.key()?, Lists::Pop(End::Right, optional_count(args)?)))
    }),
    row("lrange", 4, READ, ONE, |args| {
        Ok(Command::Lists(args.key()?, Lists::Range(args.integer()?, args.integer()?)))
    }),
    row("llen", 2, READ, ONE, |args| Ok(Command::Lists(args.key()?, Lists::Length))),
    row("lindex", 3, READ, ONE, |args| Ok(Command::Lists(args.key()?, Lists::At(args.bytes()?)))),
    row("lset", 4, WRITE, ONE, |args| {
        Ok(Command::Lists(args.key()?, Lists::Set(args.bytes()?, args.bytes()?)))
    }),
    row("ltrim", 4, WRITE, ONE, |args| {
        Ok(Command::Lists(args.key()?, Lists::Trim(args.integer()?, args.integer()?)))
    }),
    row("lrem", 4, WRITE, ONE, |args| {
        Ok(Command::Lists(args.key()?, Lists::Remove(args.integer()?, args.bytes()?)))
    }),
    row("lmove", 5, WRITE, TWO, |args| {
        let (from, to) = (args.key()?, args.key()?);
        Ok(Command::MoveElement(from, end(args)?, to, end(args)?))
    }),
    row("rpoplpush", 3, WRITE, TWO, |args| {
        Ok(Command::MoveElement(args.key()?, End::Right, args.key()?, End::Left))
    }),
    row("lpos", -3, READ, ONE, |args| {
        let (key, command) = lists::parse_find(args)?;
        Ok(Command::Lists(key, command))
    }),
    row("linsert", 5, WRITE, ONE, |args| {
        let (key, command) = lists::parse_insert(args)?;
        Ok(Command::Lists(key, command))
    }),
    row("lmpop", -4, WRITE, COUNTED, |args| {
        let ends = [("LEFT", End::Left), ("RIGHT", End::Right)];
        pops::parse(args, ends.map(|(word, end)| (word, Popped::Elements(end))))
    }),
    // Scripts. The gateway replaces a digest that it knows by the text.
    row("eval", -3, WRITE, COUNTED, |args| script::parse_script(args, false)),
    row("eval_ro", -3, READ, COUNTED, |args| script::parse_script(args, true)),
    row("evalsha", -3, WRITE, COUNTED, script::parse_digest),
    row("evalsha_ro", -3, READ, COUNTED, script::parse_digest),
    // Messages.
    row("publish", 3, WRITE, CHANNEL, |args| messages::parse_publish(args, CHANNELS)),
    row("spublish", 3, WRITE, CHANNEL, |args| messages::parse_publish(args, SHARD_CHANNELS)),
];

/// A command that sets a string, if the string is not too long.
fn fitting((key, command): (u32, Strings)) -> Result<Command, Failure> {
    if let Strings::Set { value, .. } = &command
        && cost_of([value]) > COST_MAX
    {
        return Err(TOO_LARGE);
    }
    Ok(Command::Strings(key, command))
}

fn set(args: &mut Args<'_>, condition: Condition, answer: SetAnswer) -> Result<Command, Failure> {
    let (key, value) = (args.key()?, args.bytes()?);
    fitting((key, Strings::Set { value, condition, lifetime: Lifetime::Forever, answer }))
}

fn set_for(args: &mut Args<'_>, is_seconds: bool) -> Result<Command, Failure> {
    let (key, lifetime) = (args.key()?, strings::lifetime(args, is_seconds, false)?);
    let (value, condition, answer) = (args.bytes()?, Condition::Always, SetAnswer::Status);
    fitting((key, Strings::Set { value, condition, lifetime, answer }))
}

/// Keys with strings.
fn several(args: &mut Args<'_>) -> Result<Vec<(u32, bytes::Bytes)>, Failure> {
    if !args.left().is_multiple_of(2) {
        return Err(args.arity());
    }
    let mut pairs = Vec::new();
    while args.left() > 0 {
        let (key, value) = (args.key()?, args.bytes()?);
        if cost_of([&value]) > COST_MAX {
            return Err(TOO_LARGE);
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

fn expire(args: &mut Args<'_>, is_seconds: bool, is_absolute: bool) -> Result<Command, Failure> {
    let (key, command) = keys::parse_expire(args, is_seconds, is_absolute)?;
    Ok(Command::Keys(key, command))
}

fn remaining(args: &mut Args<'_>, is_seconds: bool, is_absolute: bool) -> Result<Command, Failure> {
    Ok(Command::Keys(args.key()?, Keys::Remaining { is_seconds, is_absolute }))
}

fn combine(args: &mut Args<'_>, how: Combination) -> Result<Command, Failure> {
    Ok(Command::Combine(how, args.all_keys()?))
}

fn combine_into(args: &mut Args<'_>, how: Combination) -> Result<Command, Failure> {
    Ok(Command::CombineInto(how, args.key()?, args.all_keys()?))
}

fn sorted((key, command): (u32, Sorted)) -> Result<Command, Failure> {
    Ok(Command::Sorted(key, command))
}

fn merged(args: &mut Args<'_>, how: Combination) -> Result<Command, Failure> {
    let (merge, has_scores) = merge::parse(args, how, true)?;
    Ok(Command::Merge(merge, has_scores))
}

fn merged_into(args: &mut Args<'_>, how: Combination) -> Result<Command, Failure> {
    let target = args.key()?;
    let (merge, _) = merge::parse(args, how, false)?;
    Ok(Command::MergeInto(target, merge))
}

fn push(args: &mut Args<'_>, end: End, only_existing: bool) -> Result<Command, Failure> {
    Ok(Command::Lists(args.key()?, Lists::Push(end, args.all(), only_existing)))
}

fn optional_count(args: &mut Args<'_>) -> Result<Option<u64>, Failure> {
    if args.left() == 0 { Ok(None) } else { args.count().map(Some) }
}

fn end(args: &mut Args<'_>) -> Result<End, Failure> {
    if args.takes("LEFT") {
        Ok(End::Left)
    } else if args.takes("RIGHT") {
        Ok(End::Right)
    } else {
        Err(SYNTAX)
    }
}
