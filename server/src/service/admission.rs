//! Bounds requests in flight and their bytes, before they are decoded.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::codegen::Body as HttpBody;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::{Request, Status};

use super::limits::Limits;
use super::{EFFECT, refuse};

/// The remaining capacity. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Admission {
    requests: Arc<Semaphore>,
    requests_max: usize,
    bytes: Arc<Semaphore>,
    bytes_max: usize,
    refused: Arc<AtomicU64>,
}

impl Admission {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            requests: Arc::new(Semaphore::new(limits.requests_max)),
            requests_max: limits.requests_max,
            bytes: Arc::new(Semaphore::new(limits.request_bytes_in_flight_max)),
            bytes_max: limits.request_bytes_in_flight_max,
            refused: Arc::default(),
        }
    }

    /// Requests in flight.
    pub(super) fn requests(&self) -> usize {
        self.requests_max.saturating_sub(self.requests.available_permits())
    }

    /// Requests refused for lack of room so far.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Counts a refusal for lack of room, and says why.
    pub(super) fn busy(&self, what: &str) -> Status {
        self.refused.fetch_add(1, Ordering::Relaxed);
        refuse(Status::resource_exhausted(format!(
            "busy: {what}; try again after a pause, or at another gateway"
        )))
    }

    /// Room for one more request.
    pub(super) fn admit(&self) -> Result<Admitted, Status> {
        let request = Arc::clone(&self.requests).try_acquire_owned();
        let request = request.map_err(|_| {
            let most = self.requests_max;
            self.busy(&format!("{most} requests are pending, which is limits.requests_max"))
        })?;
        let bytes = Arc::new(Held { permit: Mutex::new(None) });
        Ok(Admitted { _request: Arc::new(request), bytes, is_reached: Arc::default() })
    }

    pub(super) fn charge(&self, held: &Held, bytes: usize) -> Result<(), Status> {
        if bytes == 0 {
            return Ok(());
        }
        let many = u32::try_from(bytes).ok();
        let more = many.and_then(|n| Arc::clone(&self.bytes).try_acquire_many_owned(n).ok());
        let more = more.ok_or_else(|| {
            let most = self.bytes_max;
            self.busy(&format!(
                "the pending requests would exceed {most} bytes, which is \
                 limits.request_bytes_in_flight_max"
            ))
        })?;
        let mut permit = held.permit.lock().unwrap_or_else(PoisonError::into_inner);
        match permit.as_mut() {
            Some(permit) => permit.merge(more),
            None => *permit = Some(more),
        }
        Ok(())
    }

    /// Wraps `service` with the bounds.
    pub(super) fn guard<S>(&self, service: S) -> Guarded<S> {
        Guarded { service, admission: self.clone() }
    }
}

/// A request's part of the capacity, released when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Admitted {
    _request: Arc<OwnedSemaphorePermit>,
    bytes: Arc<Held>,
    /// True if the request has reached the service: from then on it may have an effect.
    is_reached: Arc<AtomicBool>,
}

impl Admitted {
    /// The capacity of a request that arrived through [`Admission::guard`].
    pub(super) fn of<T>(request: &Request<T>) -> Option<Self> {
        request.extensions().get::<Self>().cloned()
    }

    /// Notes that the service has the complete decoded request.
    pub(super) fn reach(&self) {
        self.is_reached.store(true, Ordering::Relaxed);
    }

    /// Only the bytes, for a transaction that outlives its request.
    pub(super) fn bytes(&self) -> Arc<Held> {
        Arc::clone(&self.bytes)
    }
}

/// Bytes charged to one request.
#[derive(Debug, Default)]
pub(super) struct Held {
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

/// A service with bounds.
#[derive(Clone, Debug)]
pub(super) struct Guarded<S> {
    service: S,
    admission: Admission,
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

type Answer<E> = Pin<Box<dyn Future<Output = Result<http::Response<Body>, E>> + Send>>;

impl<S, B> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<B>>,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Answer<S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let admitted = match self.admission.admit() {
            Ok(admitted) => admitted,
            Err(status) => return Box::pin(async move { Ok(status.into_http()) }),
        };
        let (mut parts, body) = request.into_parts();
        let (held, is_reached) = (admitted.bytes(), Arc::clone(&admitted.is_reached));
        parts.extensions.insert(admitted);
        let body = Body::new(Metered { body, admission: self.admission.clone(), held });
        let answer = self.service.call(http::Request::from_parts(parts, body));
        Box::pin(async move {
            let mut answer = answer.await?.map(Body::new);
            if !is_reached.load(Ordering::Relaxed) {
                mark_refusal(answer.headers_mut());
            }
            Ok(answer)
        })
    }
}

/// Marks a request that the transport refused, such as one that is too large: it had no effect.
fn mark_refusal(headers: &mut http::HeaderMap) {
    let has_failed = headers.get("grpc-status").is_some_and(|status| status != "0");
    if has_failed && !headers.contains_key(EFFECT) {
        headers.insert(EFFECT, http::HeaderValue::from_static("none"));
    }
}

/// A body whose bytes are charged as they arrive.
struct Metered {
    body: Body,
    admission: Admission,
    held: Arc<Held>,
}

impl HttpBody for Metered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(busy) = self.admission.charge(&self.held, data.len())
        {
            return Poll::Ready(Some(Err(busy)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}
