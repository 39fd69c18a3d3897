//! The requests of [`crate::api::control`] over HTTP, if enabled: `POST /v1/VERB` with the fields
//! of the request as JSON and a token as bearer.
//!
//! A connection carries one request, as on the socket. It is encrypted, and a client knows the
//! daemon by its certificate before it sends its token; unencrypted HTTP is for other programs on
//! this machine, and only on request. Two checks protect against web pages in a user's browser: a
//! page has no token, and after DNS rebinding its `Host` is not one that is accepted here.

use crate::AgentError;
use crate::api::caller::Caller;
use crate::api::connections::{self, Admission, Admitted, Timed};
use crate::api::control::{self, Reply, Request};
use crate::api::dashboard;
use crate::api::tls::{self, Fingerprint, Identity};
use crate::os::Disk;
use crate::paths::Paths;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::borrow::Cow;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// Longest head of a request, in bytes.
const LONGEST_HEAD: usize = 16 << 10;
const MOST_HEADERS: usize = 64;
/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(10);
const MOST_CONNECTIONS: usize = 64;
/// Stack of a connection's thread: cryptography needs more than reading lines.
const STACK: usize = 512 << 10;
const PREFIX: &str = "/v1/";
/// The path of what the dashboard shows, and of the journal of this number behind it.
const STREAM: &str = "/v1/stream";
/// Most connections that stay open for a dashboard.
const MOST_VIEWERS: usize = 32;
/// How long a viewer may take to read a message.
const VIEWER_WITHIN: Duration = Duration::from_secs(20);
/// Without news a viewer hears this often that the connection still exists. Its token is checked as
/// often.
const BEAT: Duration = Duration::from_secs(5);

/// Who answers requests over HTTP.
pub(crate) trait Site: Send + Sync + 'static {
    /// The user to whom a token belongs.
    fn caller(&self, token: &str) -> Option<Caller>;
    /// Whether the user may not make this request.
    fn refuses(&self, request: &Request, caller: &Caller) -> bool;
    /// Takes a place for a request of this length, or says why there is none.
    fn admit(&self, caller: &Caller, length: u64) -> Result<Vec<Admitted>, String>;
    /// Answers a request.
    fn answer(&self, request: Request, caller: Caller) -> Reply;
    /// What a dashboard shows: all that holds, then what changes. `number` is that of a journal.
    fn stream(&self, number: usize, caller: &Caller) -> Result<Receiver<Arc<str>>, AgentError>;
}

/// Where to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http {
    /// The address; port 0 = any that is free.
    pub at: SocketAddr,
    /// Whether connections are not encrypted.
    pub plain: bool,
}

/// An address at which HTTP is served.
pub(crate) struct Listening {
    listener: TcpListener,
    here: SocketAddr,
    identity: Option<Identity>,
}

impl Listening {
    /// Listens; the first time, a certificate is made.
    pub(crate) fn at(http: Http, paths: &Paths, disk: &dyn Disk) -> Result<Self, AgentError> {
        if http.plain && !http.at.ip().is_loopback() {
            let what = format!(
                "{} can be reached from other machines, and the connection is not encrypted",
                http.at.ip()
            );
            return Err(AgentError::refused(what, "leave out --http-plain, or use 127.0.0.1"));
        }
        let unheard = |e: io::Error| {
            let what = format!("could not listen at {}: {e}", http.at);
            AgentError::refused(what, "port 0 takes any free port")
        };
        let listener = TcpListener::bind(http.at).map_err(unheard)?;
        let here = listener.local_addr().map_err(unheard)?;
        let identity = (!http.plain).then(|| Identity::of(paths, disk)).transpose()?;
        Ok(Self { listener, here, identity })
    }

    /// The address as a client is given it.
    pub(crate) fn url(&self) -> String {
        match &self.identity {
            Some(identity) => format!("https://{}#sha256={}", self.here, identity.fingerprint),
            None => format!("http://{}", self.here),
        }
    }

    /// Serves users, each in a thread, until the process ends.
    pub(crate) fn serve(self, site: &Arc<impl Site>) {
        let tls = self.identity.map(|i| i.config);
        // Nobody is known before its token is read.
        let admission = Admission::new("connections", MOST_CONNECTIONS, MOST_CONNECTIONS);
        let viewers = Admission::new("dashboards", MOST_VIEWERS, MOST_VIEWERS);
        loop {
            let Some((stream, _)) = connections::accepted(self.listener.accept()) else { continue };
            let mut stream = Timed::new(stream, PATIENCE);
            let admitted = match admission.admit(0) {
                Ok(admitted) => admitted,
                Err(what) => {
                    // A client that expects encryption sees that the connection was closed.
                    if tls.is_none() {
                        Answer::busy(what).send(&mut stream);
                    }
                    continue;
                }
            };
            let (site, tls) = (Arc::clone(site), tls.clone());
            let viewers = Arc::clone(&viewers);
            let work = move || {
                if let Some(mut line) = Line::open(stream, tls) {
                    let outcome = converse(&mut line, self.here, &*site, &viewers);
                    // Whoever did not even finish the handshake is not waited for again.
                    if line.is_open() {
                        line.socket().extend(control::REPLY_WITHIN);
                        match outcome {
                            Ok(Outcome::Stream(stream)) => stream.send(&mut line, &*site),
                            Ok(Outcome::Answer(answer)) | Err(answer) => answer.send(&mut line),
                        }
                        line.close();
                    }
                }
                drop(admitted);
            };
            // If no thread could be started, the connection is dropped and the next one is served.
            let thread = std::thread::Builder::new().name("http".into()).stack_size(STACK);
            drop(thread.spawn(work));
        }
    }
}

/// A connection, encrypted or not.
enum Line {
    Plain(Timed<TcpStream>),
    Tls(Box<StreamOwned<ServerConnection, Timed<TcpStream>>>),
}

impl Line {
    fn open(stream: Timed<TcpStream>, tls: Option<Arc<ServerConfig>>) -> Option<Self> {
        let Some(config) = tls else { return Some(Self::Plain(stream)) };
        let connection = ServerConnection::new(config).ok()?;
        Some(Self::Tls(Box::new(StreamOwned::new(connection, stream))))
    }

    /// Whether something can be sent: the handshake is done, where there is one.
    fn is_open(&self) -> bool {
        match self {
            Self::Plain(_) => true,
            Self::Tls(stream) => !stream.conn.is_handshaking(),
        }
    }

    fn socket(&mut self) -> &mut Timed<TcpStream> {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &mut stream.sock,
        }
    }

    fn close(self) {
        match self {
            Self::Plain(stream) => stream.drain(),
            Self::Tls(mut stream) => {
                stream.conn.send_close_notify();
                let _ = stream.flush();
                stream.sock.drain();
            }
        }
    }
}

impl Read for Line {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(to),
            Self::Tls(stream) => stream.read(to),
        }
    }
}

impl Write for Line {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(from),
            Self::Tls(stream) => stream.write(from),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// What becomes of a request.
enum Outcome {
    Answer(Answer),
    Stream(Stream),
}

/// A response.
struct Answer {
    status: u16,
    kind: &'static str,
    header: Option<&'static str>,
    body: Cow<'static, [u8]>,
}

impl Answer {
    fn reply(status: u16, reply: &Reply) -> Self {
        let mut body = serde_json::to_vec(reply).expect("a reply can always be written");
        body.push(b'\n');
        Self { status, kind: "application/json", header: None, body: body.into() }
    }

    fn no(status: u16, what: impl Into<String>, hint: Option<&str>) -> Self {
        Self::reply(status, &Reply::Error { what: what.into(), hint: hint.map(Into::into) })
    }

    fn busy(what: String) -> Self {
        Self::reply(503, &Reply::Busy { what })
    }

    fn send(&self, to: &mut impl Write) {
        let head = head(self.status, self.kind, self.header, Some(self.body.len()));
        let all = [head.as_bytes(), &self.body].concat();
        let _ = to.write_all(&all).and_then(|()| to.flush());
    }
}

/// The head of a response; without a length it goes on until the connection ends.
fn head(status: u16, kind: &str, header: Option<&str>, length: Option<usize>) -> String {
    let length = length.map_or(String::new(), |n| format!("Content-Length: {n}\r\n"));
    let header = header.map_or(String::new(), |header| format!("{header}\r\n"));
    format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\n{length}Cache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n{header}\r\n",
        phrase(status)
    )
}

/// Messages for a dashboard, as server-sent events.
struct Stream {
    messages: Receiver<Arc<str>>,
    token: String,
    _viewer: Admitted,
}

impl Stream {
    /// Sends messages until there are no more, the viewer leaves, or its token ends.
    fn send(self, to: &mut Line, site: &dyn Site) {
        let head = head(200, "text/event-stream", None, None);
        let mut sent = to.write_all(head.as_bytes());
        while sent.is_ok() && site.caller(&self.token).is_some() {
            let text = match self.messages.recv_timeout(BEAT) {
                Ok(message) => format!("data: {message}\n\n"),
                Err(RecvTimeoutError::Timeout) => ":\n\n".into(),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            to.socket().extend(VIEWER_WITHIN);
            sent = to.write_all(text.as_bytes()).and_then(|()| to.flush());
        }
    }
}

fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        421 => "Misdirected Request",
        422 => "Unprocessable Content",
        431 => "Request Header Fields Too Large",
        _ => "Service Unavailable",
    }
}

/// The head of a request.
struct Asked {
    method: String,
    path: String,
    host: Option<String>,
    bearer: Option<String>,
    length: Option<u64>,
    waits: bool,
}

fn converse(
    stream: &mut Line,
    here: SocketAddr,
    site: &dyn Site,
    viewers: &Arc<Admission>,
) -> Result<Outcome, Answer> {
    let (asked, body) = read_head(stream)?;
    let usual = if matches!(stream, Line::Tls(_)) { 443 } else { 80 };
    if !asked.host.as_deref().is_some_and(|host| is_here(host, here, usual)) {
        let what = "the Host of the request is not this daemon";
        return Err(Answer::no(421, what, Some("use its address, or localhost")));
    }
    if let Some(asset) = dashboard::asset(&asked.path).filter(|_| asked.method == "GET") {
        let (kind, body) = (asset.kind, Cow::Borrowed(asset.body.as_bytes()));
        let header = Some(dashboard::POLICY);
        return Ok(Outcome::Answer(Answer { status: 200, kind, header, body }));
    }
    let token = asked.bearer.clone().unwrap_or_default();
    let Some(caller) = site.caller(&token) else {
        let hint = "send `Authorization: Bearer TOKEN`; `roommate token create` makes one";
        let what = "the token is missing, wrong, expired or revoked";
        let mut answer = Answer::no(401, what, Some(hint));
        answer.header = Some("WWW-Authenticate: Bearer");
        return Err(answer);
    };
    if let Some(number) = stream_number(&asked.path) {
        only(&asked, "GET", "Allow: GET")?;
        let viewer = viewers.admit(0).map_err(Answer::busy)?;
        let messages = site.stream(number, &caller);
        let messages = messages.map_err(|e| Answer::reply(422, &e.into()))?;
        return Ok(Outcome::Stream(Stream { messages, token, _viewer: viewer }));
    }
    answer(stream, &asked, body, (site, caller)).map(Outcome::Answer)
}

/// The number of the journal in the path of a stream; 0 if there is none.
fn stream_number(path: &str) -> Option<usize> {
    match path.strip_prefix(STREAM)? {
        "" => Some(0),
        number => number.strip_prefix('/')?.parse().ok(),
    }
}

/// Refuses other methods.
fn only(asked: &Asked, method: &str, allow: &'static str) -> Result<(), Answer> {
    if asked.method == method {
        return Ok(());
    }
    let what = format!("method {} is not supported", asked.method);
    let mut answer = Answer::no(405, what, Some(&format!("use {method}")));
    answer.header = Some(allow);
    Err(answer)
}

/// Answers a request with a verb.
fn answer(
    stream: &mut Line,
    asked: &Asked,
    mut body: Vec<u8>,
    (site, caller): (&dyn Site, Caller),
) -> Result<Answer, Answer> {
    let verb = asked.path.strip_prefix(PREFIX).filter(|v| control::VERBS.contains(v));
    let Some(verb) = verb else {
        let what = format!("no such path: {:?}", asked.path);
        let hint = format!("the paths are {PREFIX}VERB for {}", control::VERBS.join(", "));
        return Err(Answer::no(404, what, Some(&hint)));
    };
    only(asked, "POST", "Allow: POST")?;
    let Some(length) = asked.length else {
        return Err(Answer::no(
            411,
            "the length of the request is not given",
            Some("send Content-Length"),
        ));
    };
    let most = control::LONGEST_REQUEST;
    if length > most {
        return Err(Answer::reply(413, &AgentError::TooLong { length, most }.into()));
    }
    let _places = site.admit(&caller, length).map_err(Answer::busy)?;
    if asked.waits && (body.len() as u64) < length {
        let _ = stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
        let _ = stream.flush();
    }
    while (body.len() as u64) < length {
        body.extend(some(stream)?);
    }
    body.truncate(length as usize);
    let request = request(verb, &body).map_err(|what| {
        let what = format!("the request is not valid: {what}");
        Answer::no(400, what, Some("docs/reference/http.md lists the fields of each verb"))
    })?;
    let refused = site.refuses(&request, &caller);
    let reply = site.answer(request, caller);
    let status = match reply {
        Reply::Error { .. } if refused => 403,
        Reply::Error { .. } => 422,
        Reply::Busy { .. } => 503,
        _ => 200,
    };
    Ok(Answer::reply(status, &reply))
}

/// The request made of a verb and its fields.
fn request(verb: &str, body: &[u8]) -> Result<Request, String> {
    let blank = body.iter().all(u8::is_ascii_whitespace);
    let fields: serde_json::Value = if blank {
        serde_json::json!({})
    } else {
        serde_json::from_slice(body).map_err(|e| e.to_string())?
    };
    serde_json::from_value(serde_json::json!({ verb: fields })).map_err(|e| e.to_string())
}

/// Reads some bytes; an error if the time is over or the connection closed.
fn some(stream: &mut Line) -> Result<Vec<u8>, Answer> {
    let mut part = vec![0; 16 << 10];
    match stream.read(&mut part) {
        Ok(0) => Err(Answer::no(400, "the request is incomplete", None)),
        Ok(got) => {
            part.truncate(got);
            Ok(part)
        }
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
        Err(e) if e.kind() == io::ErrorKind::TimedOut => {
            Err(Answer::no(408, "the request did not arrive in time", None))
        }
        Err(e) => Err(Answer::no(400, format!("could not read the request: {e}"), None)),
    }
}

fn read_head(stream: &mut Line) -> Result<(Asked, Vec<u8>), Answer> {
    let mut bytes = Vec::new();
    loop {
        bytes.extend(some(stream)?);
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        match head.parse(&bytes) {
            Ok(httparse::Status::Complete(length)) => {
                let asked = asked(&head)?;
                return Ok((asked, bytes.split_off(length)));
            }
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => {}
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return Err(Answer::no(431, "the head of the request is too long", None));
            }
            Err(e) => return Err(Answer::no(400, format!("this is not HTTP: {e}"), None)),
        }
    }
}

fn asked(head: &httparse::Request<'_, '_>) -> Result<Asked, Answer> {
    let one = |name: &str| -> Result<Option<String>, Answer> {
        let mut values = head.headers.iter().filter(|h| h.name.eq_ignore_ascii_case(name));
        let value = values.next().map(|h| String::from_utf8_lossy(h.value).trim().to_string());
        // A proxy in between might use the other of two differing values.
        match values.next() {
            Some(_) => Err(Answer::no(400, format!("{name} is given twice"), None)),
            None => Ok(value),
        }
    };
    let length = match one("content-length")? {
        Some(text) => {
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            let number = text.parse().ok().filter(|_| digits);
            Some(number.ok_or_else(|| Answer::no(400, "Content-Length is not a number", None))?)
        }
        None => None,
    };
    let bearer = one("authorization")?;
    let bearer = bearer.as_deref().and_then(|v| v.split_once(' '));
    Ok(Asked {
        method: head.method.unwrap_or_default().into(),
        path: head.path.unwrap_or_default().into(),
        host: one("host")?,
        bearer: bearer
            .filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"))
            .map(|(_, t)| t.trim().into()),
        length: if one("transfer-encoding")?.is_some() { None } else { length },
        waits: one("expect")?.is_some_and(|v| v.eq_ignore_ascii_case("100-continue")),
    })
}

/// Whether a `Host` is this daemon: an IP address, `localhost`, or beyond loopback the host's name.
fn is_here(host: &str, here: SocketAddr, usual_port: u16) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()),
        _ => (host, Some(usual_port)),
    };
    if port != Some(here.port()) {
        return false;
    }
    let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
    let own = || fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok()
        || (!here.ip().is_loopback() && bare.eq_ignore_ascii_case(own().trim()))
}

/// A daemon that is reached over HTTPS: its address, and the certificate that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// `HOST:PORT`.
    authority: String,
    fingerprint: Fingerprint,
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "https://{}", self.authority)
    }
}

impl Server {
    /// The daemon at `https://HOST:PORT#sha256=FINGERPRINT`. If the fingerprint is not in the
    /// address, it is the one that was given besides, else that of a state on this machine.
    pub fn new(url: &str, fingerprint: Option<&str>, state: &Paths) -> Result<Self, AgentError> {
        let wrong = |what: &str| {
            let hint = "`roommate describe` on that machine shows https://HOST:PORT#sha256=...";
            AgentError::refused(format!("{url:?}: {what}"), hint)
        };
        if url.starts_with("http://") {
            return Err(wrong("without encryption, whoever listens there would get the token"));
        }
        let rest = url.strip_prefix("https://").ok_or_else(|| wrong("expected https://"))?;
        let (place, own) = match rest.split_once('#') {
            None => (rest, None),
            Some((place, tag)) => {
                let own = tag.strip_prefix("sha256=");
                (place, Some(own.ok_or_else(|| wrong("expected #sha256=FINGERPRINT"))?))
            }
        };
        let fingerprint = match own.or(fingerprint) {
            Some(text) => tls::read_fingerprint(text)
                .ok_or_else(|| wrong("a fingerprint has 64 hexadecimal digits"))?,
            None => tls::fingerprint_in(state)
                .ok_or_else(|| wrong("the fingerprint of its certificate is not known"))?,
        };
        Ok(Self { authority: place.trim_end_matches('/').into(), fingerprint })
    }
}

/// Sends a request over HTTPS. Nothing is sent before the daemon has proven who it is.
pub(crate) fn ask(server: &Server, token: &str, request: &Request) -> Result<Reply, AgentError> {
    let tagged = serde_json::to_value(request).expect("a request can always be written");
    let (verb, fields) = tagged
        .as_object()
        .and_then(|o| o.iter().next())
        .expect("a request is an object with one member");
    let body = control::sendable(fields.to_string().into_bytes())?;
    let head = format!(
        "POST {PREFIX}{verb} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        server.authority,
        body.len()
    );
    let mut stream = connect(server).map_err(|error| {
        let server = server.to_string();
        match error.kind() {
            _ if tls::is_stranger(&error) => AgentError::Stranger { server },
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                AgentError::Busy { what: format!("{server} closed the connection at once") }
            }
            _ => AgentError::NoServer { server, error },
        }
    })?;
    // A daemon that refuses a request before it has read all of it has said why.
    let sent = stream.write_all(&[head.as_bytes(), &body].concat()).and_then(|()| stream.flush());
    let mut answer = Vec::new();
    let read = (&mut stream).take(control::LONGEST_REPLY).read_to_end(&mut answer);
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    let odd =
        |what: &str| control::lost(io::Error::new(io::ErrorKind::InvalidData, what.to_string()));
    let length = match head.parse(&answer) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => {
            sent.and(read.map(drop)).map_err(control::lost)?;
            return Err(odd("the response is incomplete"));
        }
        Err(e) => return Err(odd(&format!("the response is not HTTP: {e}"))),
    };
    control::read_reply(&answer[length..])
}

/// An encrypted connection to the daemon that is expected at this address.
fn connect(server: &Server) -> io::Result<StreamOwned<rustls::ClientConnection, Timed<TcpStream>>> {
    let mut found = std::net::ToSocketAddrs::to_socket_addrs(&server.authority)?;
    let address = found.next().ok_or_else(|| io::Error::other("it has no address"))?;
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    let mut stream = Timed::new(stream, control::ANSWER_WITHIN);
    let host = address.ip().to_string();
    let mut tls =
        tls::connection(server.fingerprint, &host).map_err(|e| io::Error::other(e.to_string()))?;
    while tls.is_handshaking() {
        tls.complete_io(&mut stream)?;
    }
    Ok(StreamOwned::new(tls, stream))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::disk;

    #[test]
    fn only_addresses_and_localhost_are_accepted_as_host() {
        let here: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        for host in ["127.0.0.1:8080", "localhost:8080", "[::1]:8080", "LOCALHOST:8080"] {
            assert!(is_here(host, here, 80), "{host}");
        }
        for host in
            ["evil.example:8080", "127.0.0.1", "localhost:80", "", "127.0.0.1.evil.example:8080"]
        {
            assert!(!is_here(host, here, 80), "{host}");
        }
    }

    #[test]
    fn a_server_is_known_by_its_fingerprint_and_encrypted() {
        let folder = tempfile::tempdir().unwrap();
        let (paths, hex) = (Paths::new(folder.path()), "ab".repeat(32));
        let new = |url: &str, given| Server::new(url, given, &paths).map_err(|e| e.to_string());
        let expect = Server { authority: "h:1".into(), fingerprint: [0xab; 32] };
        assert_eq!(new(&format!("https://h:1#sha256={hex}"), None), Ok(expect.clone()));
        assert_eq!(new("https://h:1/", Some(&hex)), Ok(expect));
        for (url, what) in [
            ("http://127.0.0.1:1", "would get the token"),
            ("h:1", "expected https://"),
            ("https://h:1", "is not known"),
            ("https://h:1#sha256=ab", "64 hexadecimal digits"),
            ("https://h:1#md5=ab", "expected #sha256="),
        ] {
            let error = new(url, None).unwrap_err();
            assert!(error.contains(what), "{url}: {error}");
        }
    }

    #[test]
    fn unencrypted_http_stays_on_this_machine() {
        let folder = tempfile::tempdir().unwrap();
        let listen = |at: &str, plain| {
            let http = Http { at: at.parse().unwrap(), plain };
            let listening = Listening::at(http, &Paths::new(folder.path()), &disk::RealDisk);
            listening.map(|l| l.url()).map_err(|e| e.to_string())
        };
        assert!(listen("0.0.0.0:0", true).unwrap_err().contains("is not encrypted"));
        assert!(listen("127.0.0.1:0", true).unwrap().starts_with("http://127.0.0.1:"));
        let url = listen("127.0.0.1:0", false).unwrap();
        assert!(Server::new(&url, None, &Paths::new("nowhere")).is_ok(), "{url}");
    }

    #[test]
    fn every_verb_is_known() {
        for verb in control::VERBS {
            let error = request(verb, b"{\"nonsense\": 1}").unwrap_err();
            assert!(!error.contains("unknown variant"), "{verb}: {error}");
        }
        assert_eq!(request("ps", b" ").unwrap(), Request::Ps {});
        assert!(request("nothing", b"").unwrap_err().contains("unknown variant"));
    }
}
