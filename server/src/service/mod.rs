//! The client API over gRPC.

pub(crate) mod api {
    #![allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic)]
    tonic::include_proto!("orthodrome.v1");
}
