//! Frames, which a connection carries after its handshake.
//!
//! A frame has `length` (four bytes, little-endian, of everything after the checksum), `checksum`
//! (CRC-32C of everything after it), `kind` (one byte), and a body. The body of a message has its
//! sender, its receiver and its bytes; the body of a ping or its answer has a number of eight
//! bytes; that of `Leaving` has one byte. Frames have the checksum under TLS too: it costs little, and one format is simpler than
//! two.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use orthodrome_core::{Limits, NodeId};

/// Maximum size of a message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = Limits::SERVER.message_bytes;
/// Length of the header before a message's bytes.
pub const HEAD: usize = 17;
const PREFIX: usize = 8;
const LENGTH_MAX: usize = MESSAGE_BYTES_MAX + HEAD - PREFIX;

const PING: u8 = 1;
const PONG: u8 = 2;
const MESSAGE: u8 = 3;
const ASK: u8 = 4;
const ANSWER: u8 = 5;
const LEAVING: u8 = 6;

/// One frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// A ping, to be answered with the same number.
    Ping(u64),
    /// The answer to a ping.
    Pong(u64),
    /// The sender is stopping.
    Leaving {
        /// Transactions of its clients are still pending.
        has_pending: bool,
    },
    /// A message between machines.
    Message {
        /// The sending machine.
        from: NodeId,
        /// The receiving machine.
        to: NodeId,
        /// The message.
        bytes: Bytes,
    },
    /// A request for names, or the answer to one ([`orthodrome_core::scan`]).
    Names {
        /// The sender.
        from: NodeId,
        /// The receiver.
        to: NodeId,
        /// True for the answer.
        is_answer: bool,
        /// The request or the answer.
        bytes: Bytes,
    },
}

/// Bytes that are not a frame. The connection is closed, because the start of the next frame is
/// unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// The length is over the limit, or too short for any frame.
    #[error("a frame of {0} bytes; frames have 1 to {LENGTH_MAX}")]
    Length(usize),
    /// The checksum is wrong.
    #[error("a frame with a wrong checksum")]
    Checksum,
    /// A kind of frame that this version does not know.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// The length of the body is wrong for its kind.
    #[error("a frame of kind {kind} with a body of {length} bytes")]
    Body {
        /// Its kind.
        kind: u8,
        /// Its length.
        length: usize,
    },
}

/// The frame of a message; `encode` appends the message's bytes. None if they exceed the limit.
pub fn message(
    from: NodeId,
    to: NodeId,
    encode: impl FnOnce(&mut BytesMut),
) -> Result<Bytes, FrameError> {
    addressed(MESSAGE, from, to, encode)
}

/// The frame of a request for names, or of an answer, as [`message`].
pub fn names(
    from: NodeId,
    to: NodeId,
    is_answer: bool,
    encode: impl FnOnce(&mut BytesMut),
) -> Result<Bytes, FrameError> {
    addressed(if is_answer { ANSWER } else { ASK }, from, to, encode)
}

fn addressed(
    kind: u8,
    from: NodeId,
    to: NodeId,
    encode: impl FnOnce(&mut BytesMut),
) -> Result<Bytes, FrameError> {
    let mut frame = BytesMut::with_capacity(256);
    frame.put_bytes(0, PREFIX);
    frame.put_u8(kind);
    frame.put_u32_le(from.0);
    frame.put_u32_le(to.0);
    encode(&mut frame);
    finish(&mut frame)?;
    Ok(frame.freeze())
}

/// The frame of a ping or its answer.
#[must_use]
pub fn signal(is_answer: bool, number: u64) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + 9);
    frame.put_bytes(0, PREFIX);
    frame.put_u8(if is_answer { PONG } else { PING });
    frame.put_u64_le(number);
    // Nine bytes are within any limit.
    let _ = finish(&mut frame);
    frame.freeze()
}

/// The frame that says that this process is stopping.
#[must_use]
pub fn leaving(has_pending: bool) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + 2);
    frame.put_bytes(0, PREFIX);
    frame.put_slice(&[LEAVING, u8::from(has_pending)]);
    // Two bytes are within any limit.
    let _ = finish(&mut frame);
    frame.freeze()
}

fn finish(frame: &mut BytesMut) -> Result<(), FrameError> {
    let (mut prefix, body) = frame.split_at_mut(PREFIX);
    if body.len() > LENGTH_MAX {
        return Err(FrameError::Length(body.len()));
    }
    prefix.put_u32_le(body.len() as u32);
    prefix.put_u32_le(crc32c::crc32c(body));
    Ok(())
}

/// Takes the first frame out of `buffer`; none if it is incomplete. Memory is allocated only after
/// the length has been checked.
///
/// # Errors
/// See [`FrameError`].
pub fn take(buffer: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
    let mut prefix = &buffer[..];
    if prefix.len() < PREFIX {
        return Ok(None);
    }
    let length = prefix.get_u32_le() as usize;
    let checksum = prefix.get_u32_le();
    if length == 0 || length > LENGTH_MAX {
        return Err(FrameError::Length(length));
    }
    let Some(body) = prefix.get(..length) else {
        buffer.reserve(PREFIX + length - buffer.len());
        return Ok(None);
    };
    if crc32c::crc32c(body) != checksum {
        return Err(FrameError::Checksum);
    }
    let frame = parse(body)?;
    buffer.advance(PREFIX + length);
    Ok(Some(frame))
}

fn parse(mut body: &[u8]) -> Result<Frame, FrameError> {
    let kind = body.get_u8();
    let length = body.len();
    match kind {
        PING | PONG if length != 8 => Err(FrameError::Body { kind, length }),
        PING => Ok(Frame::Ping(body.get_u64_le())),
        PONG => Ok(Frame::Pong(body.get_u64_le())),
        LEAVING if length != 1 => Err(FrameError::Body { kind, length }),
        LEAVING => Ok(Frame::Leaving { has_pending: body.get_u8() != 0 }),
        MESSAGE | ASK | ANSWER if length < 8 => Err(FrameError::Body { kind, length }),
        ASK | ANSWER => Ok(Frame::Names {
            from: NodeId(body.get_u32_le()),
            to: NodeId(body.get_u32_le()),
            is_answer: kind == ANSWER,
            bytes: Bytes::copy_from_slice(body),
        }),
        MESSAGE => Ok(Frame::Message {
            from: NodeId(body.get_u32_le()),
            to: NodeId(body.get_u32_le()),
            // The bytes are copied, because keys and values of the message are kept, and would keep
            // the whole read buffer alive.
            bytes: Bytes::copy_from_slice(body),
        }),
        other => Err(FrameError::Kind(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Bytes {
        message(NodeId(1), NodeId(9), |out| out.put_slice(b"hello")).unwrap()
    }

    fn all(mut buffer: BytesMut) -> Result<(Vec<Frame>, usize), FrameError> {
        let mut frames = Vec::new();
        while let Some(frame) = take(&mut buffer)? {
            frames.push(frame);
        }
        Ok((frames, buffer.len()))
    }

    #[test]
    fn frames_are_found_wherever_the_stream_is_cut() {
        let [stays, leaves] = [true, false].map(leaving);
        let stream = [hello(), signal(false, 7), stays, signal(true, 8), leaves, hello()].concat();
        let message =
            Frame::Message { from: NodeId(1), to: NodeId(9), bytes: Bytes::from_static(b"hello") };
        let [stays, leaves] = [true, false].map(|has_pending| Frame::Leaving { has_pending });
        let (ping, pong) = (Frame::Ping(7), Frame::Pong(8));
        let expected = [message.clone(), ping, stays, pong, leaves, message];
        for cut in 0..=stream.len() {
            let mut buffer = BytesMut::from(&stream[..cut]);
            let mut frames = Vec::new();
            for rest in [&[][..], &stream[cut..]] {
                buffer.extend_from_slice(rest);
                while let Some(frame) = take(&mut buffer).unwrap() {
                    frames.push(frame);
                }
            }
            assert_eq!(frames, expected, "cut at {cut}");
        }
    }

    #[test]
    fn bodies_of_a_wrong_length_are_refused() {
        for (kind, length) in [(PING, 7), (PONG, 9), (LEAVING, 0), (LEAVING, 2), (MESSAGE, 7)] {
            let mut frame = BytesMut::zeroed(PREFIX + 1 + length);
            frame[PREFIX] = kind;
            finish(&mut frame).unwrap();
            assert_eq!(take(&mut frame), Err(FrameError::Body { kind, length }));
        }
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_before_memory_is_taken() {
        for length in [0, LENGTH_MAX as u32 + 1, u32::MAX] {
            let mut buffer = BytesMut::from(&hello()[..]);
            buffer[..4].copy_from_slice(&length.to_le_bytes());
            let capacity = buffer.capacity();
            assert_eq!(take(&mut buffer), Err(FrameError::Length(length as usize)));
            assert_eq!(buffer.capacity(), capacity);
        }
        let most = message(NodeId(1), NodeId(2), |out| out.put_bytes(7, MESSAGE_BYTES_MAX));
        let (frames, _) = all(BytesMut::from(&most.unwrap()[..])).unwrap();
        assert_eq!(frames.len(), 1);
        let over = message(NodeId(1), NodeId(2), |out| out.put_bytes(7, MESSAGE_BYTES_MAX + 1));
        assert!(matches!(over, Err(FrameError::Length(_))));
    }

    #[test]
    fn a_flipped_bit_is_never_a_frame() {
        let frame = hello();
        for bit in 0..frame.len() * 8 {
            let mut buffer = BytesMut::from(&frame[..]);
            buffer[bit / 8] ^= 1 << (bit % 8);
            if let Ok((frames, _)) = all(buffer) {
                assert!(frames.is_empty(), "bit {bit} gave {frames:?}");
            }
        }
    }

    proptest! {
        #![proptest_config(crate::fuzz_config())]

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = all(BytesMut::from(&bytes[..]));
            // With a correct length and checksum, kind and body are parsed.
            let mut framed = BytesMut::new();
            framed.put_bytes(0, PREFIX);
            framed.put_slice(&bytes);
            finish(&mut framed).unwrap();
            let _ = all(framed);
        }
    }
}
