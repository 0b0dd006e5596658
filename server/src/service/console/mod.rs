//! The web console: a page at the address and with the TLS of the gRPC API. It shows what this node
//! knows of the cluster, and what its gateway does.
//!
//! It needs a credential with the role `read`, as `/metrics` does. A browser cannot send a bearer
//! token by itself, so a form takes the token and keeps it in a cookie. The page loads nothing from
//! elsewhere, works without scripts, and changes nothing.
//!
//! Server-sent events keep the page up to date: once a second, the parts of the page that changed.
//! All viewers of a node share one rendering, and without viewers there is none.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::ordered::OrdMap;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION,
    REFERRER_POLICY, SET_COOKIE, X_CONTENT_TYPE_OPTIONS,
};
use axum::middleware::{Next, from_fn};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

mod charts;
mod live;
mod login;
mod regions;
#[cfg(test)]
mod tests;
mod text;
mod view;

use self::regions::RegionMap;
use self::view::{Facts, Part};
use super::Service;
use super::access::{Access, DEFAULT_KEYSPACE, Role};
use super::http::http_status;

/// The maximum number of viewers at the same time.
const VIEWERS_MAX: usize = 16;
/// The time between two events.
const PERIOD: Duration = Duration::from_secs(1);
/// A rendering of this age is shown to the next viewer. It is shorter than [`PERIOD`], so that a
/// single viewer sees something new each time.
const FRESH: Duration = Duration::from_millis(800);

/// Nothing but what the node itself serves; no scripts or styles within the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

const SCRIPT: &str = include_str!("console.js");
const STYLE: &str = include_str!("console.css");
const ICON: &str = include_str!("icon.svg");

/// What the console needs.
#[derive(Clone)]
struct Console {
    service: Service,
    access: Access,
    /// Whether clients use TLS.
    is_tls: bool,
    /// Cancelled when the node stops serving.
    ending: CancellationToken,
    viewers: Arc<Semaphore>,
    /// The positions of the regions; none if there are too many to draw.
    map: Arc<Option<RegionMap>>,
    rendered: Arc<Mutex<Option<Rendered>>>,
}

/// The parts of the page at some time.
#[derive(Clone)]
struct Rendered {
    at: Instant,
    parts: Arc<[Part]>,
}

/// The routes of the console. Events end when `ending` is cancelled.
pub(super) fn routes(
    service: Service,
    access: Access,
    is_tls: bool,
    ending: CancellationToken,
) -> Router {
    let console = Console {
        map: Arc::new(RegionMap::new(&service.inner.cluster)),
        service,
        access,
        is_tls,
        ending,
        viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
        rendered: Arc::default(),
    };
    Router::new()
        .route("/", get(async || redirect("/console")))
        .route("/console", get(page))
        .route("/console/events", get(events))
        .route("/console/login", post(login::login))
        .route("/console/logout", post(login::logout))
        .route("/console/console.js", get(async || file("text/javascript; charset=utf-8", SCRIPT)))
        .route("/console/console.css", get(async || file("text/css; charset=utf-8", STYLE)))
        .route("/console/icon.svg", get(async || file("image/svg+xml", ICON)))
        .layer(from_fn(protect))
        .with_state(console)
}

/// Adds the headers that limit what a browser does with a page.
async fn protect(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    let mut set = |name: HeaderName, value| headers.insert(name, HeaderValue::from_static(value));
    set(CONTENT_SECURITY_POLICY, POLICY);
    set(X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(REFERRER_POLICY, "no-referrer");
    set(CACHE_CONTROL, "no-store");
    response
}

fn file(kind: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, kind)], text).into_response()
}

fn html(status: StatusCode, page: String) -> Response {
    (status, [(CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response()
}

fn redirect(to: &'static str) -> Response {
    (StatusCode::SEE_OTHER, [(LOCATION, to)]).into_response()
}

fn refusal(status: &Status) -> Response {
    (http_status(status.code()), format!("{}\n", status.message())).into_response()
}

async fn page(State(console): State<Console>, request: Request) -> Response {
    let _admitted = match console.service.inner.admission.admit() {
        Ok(admitted) => admitted,
        Err(status) => return refusal(&status),
    };
    if let Err(status) = console.check(&request) {
        return console.ask(&status, login::has_cookie(request.headers()));
    }
    let parts = console.parts().await;
    let about = console.service.inner.transactions.describe();
    html(StatusCode::OK, view::page(&about, &parts, !console.access.is_open()))
}

async fn events(State(console): State<Console>, request: Request) -> Response {
    let admitted = console.service.inner.admission.admit();
    if let Err(status) = admitted.and_then(|_admitted| console.check(&request)) {
        return refusal(&status);
    }
    let Ok(viewer) = Arc::clone(&console.viewers).try_acquire_owned() else {
        let busy = format!("{VIEWERS_MAX} viewers use the console of this node; close one\n");
        return (StatusCode::SERVICE_UNAVAILABLE, busy).into_response();
    };
    // One event may wait for the viewer. While it does, nothing is rendered.
    let (send, receive) = mpsc::channel(1);
    tokio::spawn(async move {
        let ending = console.ending.clone();
        ending.run_until_cancelled(console.tell(send, viewer)).await;
    });
    Sse::new(ReceiverStream::new(receive)).into_response()
}

impl Console {
    /// Checks that the sender of the request may see the console.
    fn check(&self, request: &Request) -> Result<(), Status> {
        if self.access.is_open() && !login::is_local_name(request) {
            let wrong =
                "this node has no principals, so it is reached only by an address or as localhost";
            return Err(Status::permission_denied(wrong));
        }
        let request = login::with_token(request);
        self.access.identify(&request)?.require(DEFAULT_KEYSPACE, Role::Read)
    }

    /// The form for a token. A cookie that did not help is removed, because a token decides even if
    /// there is a client certificate, too.
    fn ask(&self, status: &Status, has_cookie: bool) -> Response {
        let code = http_status(status.code());
        let why = (has_cookie || code != StatusCode::UNAUTHORIZED).then(|| status.message());
        let mut response = html(code, view::login(why));
        if has_cookie {
            response.headers_mut().insert(SET_COOKIE, login::no_cookie());
        }
        response
    }

    /// The current parts of the page. Viewers that ask at the same time get the same ones.
    async fn parts(&self) -> Arc<[Part]> {
        let mut rendered = self.rendered.lock().await;
        if let Some(rendered) = &*rendered
            && rendered.at.elapsed() < FRESH
        {
            return Arc::clone(&rendered.parts);
        }
        let inner = &*self.service.inner;
        let transactions = &inner.transactions;
        let (gauges, groups, orders, pending) = tokio::join!(
            transactions.gauges(),
            transactions.groups(),
            transactions.orders(),
            transactions.pending()
        );
        let facts = Facts {
            about: transactions.describe(),
            cluster: &inner.cluster,
            map: (*self.map).as_ref(),
            uptime: inner.started.elapsed(),
            requests: [inner.admission.requests(), inner.limits.requests_max],
            links: transactions.links(),
            gauges,
            groups,
            orders,
            pending,
            live: inner.metrics.live.seen(),
            now: Instant::now(),
        };
        let parts: Arc<[Part]> = view::parts(&facts).into();
        *rendered = Some(Rendered { at: Instant::now(), parts: Arc::clone(&parts) });
        parts
    }

    /// Sends events until the viewer is gone.
    async fn tell(
        &self,
        viewer: mpsc::Sender<Result<Event, Infallible>>,
        _place: OwnedSemaphorePermit,
    ) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut shown: OrdMap<&'static str, String> = OrdMap::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = viewer.closed() => return,
            }
            let parts = self.parts().await;
            let is_new = |part: &&Part| shown.get(part.id) != Some(&part.html);
            let new: OrdMap<&'static str, String> =
                parts.iter().filter(is_new).map(|part| (part.id, part.html.clone())).collect();
            // A map of texts is always valid JSON.
            let Ok(data) = serde_json::to_string(&new) else { return };
            if viewer.send(Ok(Event::default().data(data))).await.is_err() {
                return;
            }
            shown.extend(new);
        }
    }
}
