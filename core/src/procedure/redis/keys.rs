//! Commands on keys of any type, and what several types share.

use std::ops::Range;

use bytes::Bytes;

use super::entry::Content;
use super::parse::Args;
use super::reply::{Answer, Failure, NOT_INTEGER, Reply, SYNTAX, WRONG_TYPE};
use super::state::{Context, Slot};
use super::strings::Lifetime;
use super::{Use, number};
use crate::wire::Wire;

/// When `EXPIRE` changes the lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Wire)]
pub struct ExpireConditions {
    /// `NX`: only if the key does not expire yet.
    pub if_forever: bool,
    /// `XX`: only if the key expires.
    pub if_expires: bool,
    /// `GT`: only if it expires later than before.
    pub if_later: bool,
    /// `LT`: only if it expires earlier than before.
    pub if_earlier: bool,
}

impl ExpireConditions {
    /// Whether a key that expired at `before`, 0 for never, may expire at `at`.
    fn hold(self, before: u64, at: u64) -> bool {
        (!self.if_forever || before == 0)
            && (!self.if_expires || before != 0)
            && (!self.if_later || (before != 0 && at > before))
            && (!self.if_earlier || before == 0 || at < before)
    }
}

/// A command on one key of any type.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Keys {
    /// `TYPE`
    Type,
    /// `EXPIRE`, `PEXPIRE`, `EXPIREAT`, `PEXPIREAT`
    Expire(Lifetime, ExpireConditions),
    /// `PERSIST`
    Persist,
    /// `TTL`, `PTTL`, `EXPIRETIME`, `PEXPIRETIME`
    Remaining {
        /// In seconds, otherwise in milliseconds.
        is_seconds: bool,
        /// Since 1970, otherwise from now on.
        is_absolute: bool,
    },
    /// `OBJECT`
    Describe(Aspect),
}

/// What `OBJECT` says about a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Aspect {
    /// How Redis would keep the value in its memory.
    Encoding,
    /// How many keys share the value.
    References,
    /// How long nobody has used the key.
    IdleTime,
    /// How often the key is used.
    Frequency,
}

/// Nodes evict nothing, so they do not note when a key is used.
const NO_IDLE_TIME: Failure = Failure::new(
    "ERR idle time is not tracked, because nothing is evicted; OBJECT IDLETIME is not available",
);
const NO_FREQUENCY: Failure = Failure::new(
    "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note that \
     when switching between policies at runtime LRU and LFU data will take some time to adjust.",
);

/// `OBJECT ENCODING | REFCOUNT | IDLETIME | FREQ key`
pub(super) fn parse_object(args: &mut Args<'_>) -> Result<(u32, Keys), Failure> {
    let word = args.bytes()?;
    let all = [
        ("encoding", Aspect::Encoding),
        ("refcount", Aspect::References),
        ("idletime", Aspect::IdleTime),
        ("freq", Aspect::Frequency),
    ];
    let found = all.into_iter().find(|(name, _)| word.eq_ignore_ascii_case(name.as_bytes()));
    let Some((name, aspect)) = found else {
        let shown = String::from_utf8_lossy(word.get(..word.len().min(128)).unwrap_or_default());
        return Err(Failure::of(format!("ERR unknown subcommand '{shown}'. Try OBJECT HELP.")));
    };
    if args.left() != 1 {
        return Err(super::wrong_arity(&format!("object|{name}")));
    }
    Ok((args.key()?, Keys::Describe(aspect)))
}

fn describe(slot: &Slot, aspect: Aspect) -> Answer {
    if !slot.exists() {
        return Ok(Reply::Nil);
    }
    match aspect {
        Aspect::Encoding => {
            let content = slot.content().ok_or(WRONG_TYPE)?;
            Ok(Reply::Bulk(Bytes::from_static(encoding(content).as_bytes())))
        }
        // Each key has a value of its own.
        Aspect::References => Ok(Reply::Integer(1)),
        Aspect::IdleTime => Err(NO_IDLE_TIME),
        Aspect::Frequency => Err(NO_FREQUENCY),
    }
}

/// How Redis 7.0 keeps such a value, with its standard settings, if it was made at once.
fn encoding(content: &Content) -> &'static str {
    let is_short = |text: &Bytes| text.len() <= 64;
    let packed = |is_small: bool, otherwise| if is_small { "listpack" } else { otherwise };
    match content {
        Content::String(text) if number::integer(text).is_some() => "int",
        Content::String(text) if text.len() <= 44 => "embstr",
        Content::String(_) => "raw",
        Content::List(_) => "quicklist",
        Content::Hash(fields) => packed(
            fields.len() <= 128
                && fields.iter().all(|(name, value)| is_short(name) && is_short(value)),
            "hashtable",
        ),
        Content::Sorted(members) => {
            packed(members.len() <= 128 && members.keys().all(is_short), "skiplist")
        }
        Content::Set(members) => {
            let is_number = |name: &Bytes| number::integer(name).is_some();
            if members.len() <= 512 && members.iter().all(is_number) {
                "intset"
            } else {
                "hashtable"
            }
        }
        Content::Nothing => "none",
    }
}

impl Keys {
    pub(super) fn uses(&self) -> Use {
        match self {
            Self::Type | Self::Remaining { .. } | Self::Describe(_) => Use::Read,
            Self::Expire(..) | Self::Persist => Use::Change,
        }
    }

    pub(super) fn execute(&self, slot: &mut Slot, cx: Context) -> Answer {
        let before = slot.expires_ms();
        match self {
            Self::Type => Ok(Reply::Status(slot.type_name().unwrap_or("none"))),
            Self::Expire(lifetime, conditions) => {
                let Some(before) = before else { return Ok(Reply::Integer(0)) };
                let at = deadline(*lifetime, before, cx);
                let changes = conditions.hold(before, at);
                if changes {
                    expire_at(slot, at, cx);
                }
                Ok(Reply::flag(changes))
            }
            Self::Persist => {
                let changes = before.is_some_and(|at| at != 0);
                if changes {
                    slot.set_expires_ms(0, cx);
                }
                Ok(Reply::flag(changes))
            }
            Self::Remaining { is_seconds, is_absolute } => Ok(Reply::Integer(match before {
                None => -2,
                Some(0) => -1,
                Some(at) => {
                    let millis = if *is_absolute { at } else { at.saturating_sub(cx.now_ms) };
                    // Redis rounds a time since 1970, too.
                    let shown =
                        if *is_seconds { millis.saturating_add(500) / 1_000 } else { millis };
                    i64::try_from(shown).unwrap_or(i64::MAX)
                }
            })),
            Self::Describe(aspect) => describe(slot, *aspect),
        }
    }
}

/// The time of an expiry; 0 for never. A time before 1970 is the first millisecond after it.
pub(super) fn deadline(lifetime: Lifetime, before: u64, cx: Context) -> u64 {
    match lifetime {
        Lifetime::Forever => 0,
        Lifetime::Keep => before,
        Lifetime::In(millis) => cx.now_ms.saturating_add_signed(millis).max(1),
        Lifetime::At(millis) => u64::try_from(millis).unwrap_or(0).max(1),
    }
}

/// Sets the time of expiry of a key. If it has passed already, the key is removed.
pub(super) fn expire_at(slot: &mut Slot, at: u64, cx: Context) {
    if at != 0 && at <= cx.now_ms {
        slot.remove();
    } else {
        slot.set_expires_ms(at, cx);
    }
}

/// `EXPIRE key time [NX | XX | GT | LT]` and its relatives.
pub(super) fn parse_expire(
    args: &mut Args<'_>,
    is_seconds: bool,
    is_absolute: bool,
) -> Result<(u32, Keys), Failure> {
    let invalid = Failure::of(format!("ERR invalid expire time in '{}' command", args.name()));
    let (key, amount) = (args.key()?, args.bytes()?);
    let conditions = expire_conditions(args)?;
    let amount = number::integer(&amount).ok_or(NOT_INTEGER)?;
    let lifetime = Lifetime::parse(amount, is_seconds, is_absolute).ok_or(invalid)?;
    Ok((key, Keys::Expire(lifetime, conditions)))
}

/// The conditions after the time of `EXPIRE`, in any order and number.
fn expire_conditions(args: &mut Args<'_>) -> Result<ExpireConditions, Failure> {
    let mut conditions = ExpireConditions::default();
    while args.left() > 0 {
        let flag = if args.takes("NX") {
            &mut conditions.if_forever
        } else if args.takes("XX") {
            &mut conditions.if_expires
        } else if args.takes("GT") {
            &mut conditions.if_later
        } else if args.takes("LT") {
            &mut conditions.if_earlier
        } else {
            let word = args.bytes()?;
            let shown =
                String::from_utf8_lossy(word.get(..word.len().min(128)).unwrap_or_default());
            return Err(Failure::of(format!("ERR Unsupported option {shown}")));
        };
        *flag = true;
    }
    let ExpireConditions { if_forever, if_expires, if_later, if_earlier } = conditions;
    if if_forever && (if_expires || if_later || if_earlier) {
        return Err(Failure::new(
            "ERR NX and XX, GT or LT options at the same time are not compatible",
        ));
    }
    if if_later && if_earlier {
        return Err(Failure::new("ERR GT and LT options at the same time are not compatible"));
    }
    Ok(conditions)
}

/// `COPY source destination [REPLACE]`: the keys, and whether another key is replaced.
pub(super) fn parse_copy(args: &mut Args<'_>) -> Result<(u32, u32, bool), Failure> {
    let (from, to) = (args.key()?, args.key()?);
    let mut is_replacing = false;
    while args.left() > 0 {
        if args.takes("REPLACE") {
            is_replacing = true;
        } else if args.left() > 1 && args.takes("DB") {
            return Err(Failure::new("ERR COPY with DB is not supported"));
        } else {
            return Err(SYNTAX);
        }
    }
    if from == to {
        return Err(Failure::new("ERR source and destination objects are the same"));
    }
    Ok((from, to, is_replacing))
}

/// The part of a list from `first` to `last`, both included; negative numbers count from the end.
pub(super) fn span(first: i64, last: i64, length: usize) -> Range<usize> {
    let place = |at: i64| {
        if at >= 0 {
            return usize::try_from(at).unwrap_or(usize::MAX);
        }
        let back = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
        length.saturating_sub(back)
    };
    let is_before = |at: i64| at < 0 && at.unsigned_abs() > length as u64;
    if is_before(last) {
        return 0..0;
    }
    let (first, end) = (place(first), place(last).saturating_add(1).min(length));
    if first >= end { 0..0 } else { first..end }
}

/// The bytes of a string from `first` to `last`, both included. Other than in a list, an end before
/// the first byte is the first byte, unless both ends count from the end and are in wrong order.
pub(super) fn byte_span(first: i64, last: i64, length: usize) -> Range<usize> {
    if first < 0 && last < first {
        return 0..0;
    }
    let is_before = last < 0 && last.unsigned_abs() > length as u64;
    span(first, if is_before { 0 } else { last }, length)
}

/// One element of a list; negative numbers count from the end.
pub(super) fn position(at: i64, length: usize) -> Option<usize> {
    let place = if at >= 0 {
        usize::try_from(at).ok()?
    } else {
        length.checked_sub(usize::try_from(at.unsigned_abs()).ok()?)?
    };
    (place < length).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_those_of_redis() {
        let cases = [
            (0, -1, 5, 0..5),
            (1, 3, 5, 1..4),
            (-2, -1, 5, 3..5),
            (-9, 1, 5, 0..2),
            (3, 1, 5, 0..0),
            (5, 9, 5, 0..0),
            (0, -6, 5, 0..0),
            (0, i64::MAX, 5, 0..5),
            (i64::MIN, i64::MIN, 5, 0..0),
            (0, -1, 0, 0..0),
        ];
        for (first, last, length, wanted) in cases {
            assert_eq!(span(first, last, length), wanted, "{first} {last} {length}");
        }
        for (first, last, length, wanted) in [
            (0, -10, 5, 0..1),
            (-10, -9, 5, 0..1),
            (0, -5, 5, 0..1),
            (1, -5, 5, 0..0),
            (-3, -10, 5, 0..0),
            (-1, -3, 5, 0..0),
            (2, -9, 5, 0..0),
            (0, -10, 0, 0..0),
            (1, 3, 5, 1..4),
        ] {
            assert_eq!(byte_span(first, last, length), wanted, "{first} {last} {length}");
        }
        assert_eq!(position(-1, 3), Some(2));
        assert_eq!(position(-4, 3), None);
        assert_eq!(position(3, 3), None);
    }
}
