//! Decodes requests after counting their fields. A field of two encoded bytes may take eighty bytes
//! when decoded, so a bound on the encoded size alone would not bound the memory.

use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use tonic::codec::{Codec as TonicCodec, DecodeBuf, Decoder as TonicDecoder};
use tonic_prost::{ProstCodec, ProstEncoder};

use super::api;
use super::limits::PARTS_MAX;
use super::refuse;

/// Maximum number of fields of one message. A key may be named as read, as write and by version; an
/// operation once; the rest are single fields.
const FIELDS_MAX: usize = 4 * PARTS_MAX as usize + 64;

/// A request with a description of its nested fields.
pub(super) trait Shape {
    /// Fields that contain messages with repeated fields.
    const NESTED: &'static [Nested] = &[];
}

/// A field that contains messages with repeated fields, and those of their fields that do so too.
pub(super) struct Nested(u32, &'static [Nested]);

/// `ops`, and `call` of each.
const OPS: Nested = Nested(3, &[Nested(8, &[])]);

macro_rules! flat {
    ($($request:ident)*) => { $(impl Shape for api::$request {})* };
}
flat! { RegisterRequest BeginRequest ReadRoundRequest CommitRequest AbortRequest KeepAliveRequest
ReadRequest ScanRequest WatchRequest GrantLeaseRequest RenewLeaseRequest RevokeLeaseRequest
DescribeLeaseRequest DescribeRequest StatusRequest TransferLeaderRequest
ChangeMembersRequest }

impl Shape for api::ExecuteRequest {
    const NESTED: &'static [Nested] = &[OPS];
}

impl Shape for api::ResolveRequest {
    // `begun` and `decision.commit`.
    const NESTED: &'static [Nested] =
        &[Nested(1, &[]), Nested(2, &[OPS]), Nested(3, &[]), Nested(5, &[])];
}

/// Encodes as `tonic_prost` does; decodes after counting.
pub(super) struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> TonicCodec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Shape + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Decoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Decoder(PhantomData)
    }
}

pub(super) struct Decoder<U>(PhantomData<U>);

impl<U: Message + Default + Shape> TonicDecoder for Decoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // A message is contiguous: tonic provides one slice of its buffer.
        let bytes = buf.copy_to_bytes(buf.remaining());
        decode(&bytes).map(Some)
    }
}

fn decode<U: Message + Default + Shape>(bytes: &[u8]) -> Result<U, Status> {
    let malformed = |error: prost::DecodeError| {
        refuse(Status::invalid_argument(format!("the request is malformed: {error}")))
    };
    let fields = count(bytes, U::NESTED).map_err(malformed)?;
    if fields > FIELDS_MAX {
        return Err(refuse(Status::invalid_argument(format!(
            "the request has more than {FIELDS_MAX} fields; see `Limits`"
        ))));
    }
    U::decode(bytes).map_err(malformed)
}

/// Counts the fields of a message, and of the messages in its `nested` fields. Stops soon after the
/// bound.
fn count(mut bytes: &[u8], nested: &[Nested]) -> Result<usize, prost::DecodeError> {
    let mut fields = 0;
    while !bytes.is_empty() && fields <= FIELDS_MAX {
        let (tag, wire_type) = decode_key(&mut bytes)?;
        fields += 1;
        let within = nested.iter().find(|nested| nested.0 == tag);
        if let (WireType::LengthDelimited, Some(within)) = (wire_type, within) {
            let mut rest = bytes;
            let length = decode_varint(&mut rest)?;
            let inner = usize::try_from(length).ok().and_then(|length| rest.get(..length));
            fields += count(inner.unwrap_or_default(), within.1)?;
        }
        skip_field(wire_type, tag, &mut bytes, DecodeContext::default())?;
    }
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_many_small_fields_is_refused_undecoded() {
        let many = vec![Vec::new(); FIELDS_MAX + 1];
        let begin = api::BeginRequest { read_keys: many, ..Default::default() };
        assert!(decode::<api::BeginRequest>(&begin.encode_to_vec()).is_err());
        let begun = api::resolve_request::Begun::Interactive(begin);
        let resolve = api::ResolveRequest { begun: Some(begun), ..Default::default() };
        let status = decode::<api::ResolveRequest>(&resolve.encode_to_vec()).unwrap_err();
        assert!(status.message().contains("fields"), "{status}");
        let call = api::Call { reads: vec![Vec::new(); FIELDS_MAX], ..Default::default() };
        let op = api::Op { key: Vec::new(), op: Some(api::op::Op::Call(call)) };
        let execute = api::ExecuteRequest { ops: vec![op], ..Default::default() };
        assert!(decode::<api::ExecuteRequest>(&execute.encode_to_vec()).is_err());
        let begun = api::resolve_request::Begun::Procedure(execute);
        let resolve = api::ResolveRequest { begun: Some(begun), ..Default::default() };
        assert!(decode::<api::ResolveRequest>(&resolve.encode_to_vec()).is_err());
        let writes = vec![api::KeyWrite::default(); FIELDS_MAX + 1];
        let decision = api::resolve_request::Decision::Commit(api::Writes { writes });
        let resolve = api::ResolveRequest { decision: Some(decision), ..Default::default() };
        assert!(decode::<api::ResolveRequest>(&resolve.encode_to_vec()).is_err());
    }

    #[test]
    fn values_are_not_mistaken_for_messages() {
        // A value that reads as a message of very many fields.
        let value = [0x08, 0x01].repeat(FIELDS_MAX + 1);
        let write = api::KeyWrite { key: b"k".to_vec(), value: Some(value) };
        let commit = api::CommitRequest { txn: None, writes: vec![write] };
        assert_eq!(decode::<api::CommitRequest>(&commit.encode_to_vec()).unwrap(), commit);
    }

    #[test]
    fn groups_nested_without_end_are_malformed() {
        let deep = [0x0b_u8].repeat(10_000);
        assert!(decode::<api::ReadRequest>(&deep).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(0_u8.., 0..512)) {
            // Counting and decoding accept the same inputs.
            let counted = decode::<api::ResolveRequest>(&bytes).is_ok();
            proptest::prop_assert_eq!(counted, api::ResolveRequest::decode(&*bytes).is_ok());
        }
    }
}
