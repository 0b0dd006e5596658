//! Pages for operators, at the address and with the TLS of the gRPC API: `/metrics` for Prometheus,
//! `/livez` and `/readyz` for process supervisors. `console` has the page for people.
//!
//! `/metrics` needs a credential with the role `read`, as the API does. The other two need none,
//! like the health service of gRPC, and report only whether the node lives and serves.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use super::Service;
use super::access::{Access, DEFAULT_KEYSPACE, Role};
use super::metrics::Now;
use crate::gateway::Health;

/// The format that Prometheus and OpenMetrics readers request.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone)]
struct Pages {
    service: Service,
    access: Access,
}

/// The pages of a node.
pub(super) fn pages(service: Service, access: Access) -> Router {
    Router::new()
        .route("/livez", get(lives))
        .route("/readyz", get(serves))
        .route("/metrics", get(metrics))
        .with_state(Pages { service, access })
}

/// Answers a request for something that is not here. Probes and browsers must not take a refusal of
/// gRPC, whose HTTP status is 200, for a page.
pub(super) async fn unknown(request: Request) -> Response {
    let content = request.headers().get(CONTENT_TYPE).map(|of| of.as_bytes());
    if content.is_some_and(|of| of.starts_with(b"application/grpc")) {
        return Status::unimplemented("there is no such service or method").into_http();
    }
    let path = request.uri().path();
    let pages = "/livez, /readyz, /metrics and /console";
    (StatusCode::NOT_FOUND, format!("there is no page {path}; the pages are {pages}\n"))
        .into_response()
}

/// Whether the process should continue. A node that is shutting down lives until it has ended.
async fn lives(State(pages): State<Pages>) -> (StatusCode, String) {
    match pages.health() {
        Health::Serving | Health::Stopping => (StatusCode::OK, "ok\n".into()),
        Health::Failed(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("failed: {why}\n")),
    }
}

/// Whether clients should use this node.
async fn serves(State(pages): State<Pages>) -> (StatusCode, String) {
    match pages.health() {
        Health::Serving => (StatusCode::OK, "ok\n".into()),
        Health::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "stopping\n".into()),
        Health::Failed(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("failed: {why}\n")),
    }
}

async fn metrics(State(pages): State<Pages>, request: Request) -> Response {
    match pages.metrics(request).await {
        Ok(page) => ([(CONTENT_TYPE, OPENMETRICS)], page).into_response(),
        Err(status) => {
            (http_status(status.code()), format!("{}\n", status.message())).into_response()
        }
    }
}

/// The status of HTTP that says the same as a status of gRPC.
pub(super) fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::ResourceExhausted => StatusCode::SERVICE_UNAVAILABLE,
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::InvalidArgument
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl Pages {
    fn health(&self) -> Health {
        self.service.inner.transactions.describe().health
    }

    async fn metrics(&self, request: Request) -> Result<String, Status> {
        let inner = &*self.service.inner;
        let _admitted = inner.admission.admit()?;
        let (parts, _) = request.into_parts();
        let metadata = MetadataMap::from_headers(parts.headers);
        let request = tonic::Request::from_parts(metadata, parts.extensions, ());
        self.access.identify(&request)?.require(DEFAULT_KEYSPACE, Role::Read)?;
        let transactions = &inner.transactions;
        let (quantities, groups, pending) =
            tokio::join!(transactions.gauges(), transactions.groups(), transactions.pending());
        let now = Now {
            about: &transactions.describe(),
            requests: [inner.admission.requests(), inner.limits.requests_max],
            open: [inner.open.len(), inner.limits.txns_open_max],
            refused: inner.admission.refused(),
            uptime: inner.started.elapsed(),
            quantities: &quantities,
            groups: &groups,
            links: &transactions.links(),
            pending: pending.as_ref(),
        };
        inner.metrics.page(&now).map_err(|error| Status::internal(error.to_string()))
    }
}
