//! Messages: what a transaction publishes on channels.
//!
//! Each channel is one key, in a database that no client can select. Its value is a list of the
//! messages of the last transaction that published on the channel. So whoever watches these keys
//! ([`crate::watch`]) finds every message once, in the order of the commits. A transaction replaces
//! what others left without reading it, so publishers do not depend on each other.

use bytes::{BufMut as _, Bytes, BytesMut};

use super::Command;
use super::entry::{COST_MAX, Content, Entry, cost_of};
use super::parse::Args;
use super::reply::{Answer, Failure, Reply};
use super::state::{Context, Slot};
use crate::txn::Value;

/// The database of the keys of channels for `PUBLISH`. Clients cannot select it.
pub const CHANNELS: u8 = 128;
/// The database of the keys of channels for `SPUBLISH`.
pub const SHARD_CHANNELS: u8 = 129;

/// The bytes before a message that say when in its transaction it was published.
const PLACE_BYTES: usize = 4;

/// The messages of a transaction do not fit into the key of their channel.
const TOO_LARGE: Failure = Failure::new(
    "ERR the messages of one transaction on one channel have at most 1047552 bytes, counting 20 \
     more for each; this one was not published; publish it in a transaction of its own, or publish less",
);

/// True if the keys of this database are channels.
#[must_use]
pub const fn is_channels(database: u8) -> bool {
    matches!(database, CHANNELS | SHARD_CHANNELS)
}

/// `PUBLISH channel message`, `SPUBLISH channel message`
pub(super) fn parse_publish(args: &mut Args<'_>, database: u8) -> Result<Command, Failure> {
    let (channel, message) = (args.key_of(database)?, args.bytes()?);
    if cost_of([&message]) + PLACE_BYTES > COST_MAX {
        return Err(TOO_LARGE);
    }
    Ok(Command::Publish { channel, place: 0, message })
}

/// Publishes a message. The answer is 0: the gateway counts who receives it.
pub(super) fn publish(slot: &mut Slot, cx: Context, place: u32, message: &Bytes) -> Answer {
    // What earlier transactions left counts no more.
    let is_first = !slot.is_changed();
    let present = if is_first { 0 } else { slot.cost() };
    let more = cost_of([message]) + PLACE_BYTES;
    if present.saturating_add(more) > COST_MAX {
        return Err(TOO_LARGE);
    }
    if is_first {
        slot.remove();
    }
    let mut element = BytesMut::with_capacity(PLACE_BYTES + message.len());
    element.put_u32(place);
    element.put_slice(message);
    let (messages, cost) = slot.list_mut()?;
    messages.push_back(element.freeze());
    *cost += more;
    slot.changed(cx);
    Ok(Reply::Integer(0))
}

/// The messages in the value of a channel's key, each with its place in its transaction; none if
/// `PUBLISH` did not write the value.
#[must_use]
pub fn published(value: &Value) -> Option<Vec<(u32, Bytes)>> {
    let Content::List(elements) = Entry::decode(value)?.content else { return None };
    let message = |mut element: Bytes| {
        let place = element.get(..PLACE_BYTES)?.try_into().ok().map(u32::from_be_bytes)?;
        Some((place, element.split_off(PLACE_BYTES)))
    };
    elements.into_iter().map(message).collect()
}
