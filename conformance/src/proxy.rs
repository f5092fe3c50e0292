//! A network that does what a test says.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use tokio::io::AsyncReadExt;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::task::JoinSet;

/// A TCP proxy before a server: counts round trips, keeps back what is sent in one direction, cuts connections. For tests of lost
/// answers, dropped futures and dead networks, and of how often a call goes to the server and back.
///
/// It listens on 127.0.0.1, knows nothing of the protocol, and ends, with all its connections, when it is dropped. Within an
/// encrypted connection it counts records as well as it can; tests should not encrypt.
///
/// ```
/// # async fn example() -> std::io::Result<()> {
/// use queue_conformance::{Direction, Proxy};
///
/// let proxy = Proxy::start("127.0.0.1:5432").await?;
/// let url = format!("postgres://user@127.0.0.1:{}/app", proxy.port());
/// // .. connect a backend to the url ..
/// proxy.hold(Direction::ToClient);
/// // .. a call is sent, and committed, and its answer never comes ..
/// proxy.cut();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: AbortHandle,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Requests.
    ToServer,
    /// Answers.
    ToClient,
}

#[derive(Debug)]
struct Shared {
    server: String,
    state: watch::Sender<State>,
    round_trips: AtomicU64,
    connections: AtomicU64,
}

/// What the connections watch.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    hold_requests: bool,
    hold_answers: bool,
    /// Connections of an earlier generation are cut.
    generation: u64,
    /// Pieces that came in, to be waited for.
    requests: u64,
    answers: u64,
    /// How many round trips on the one is whose answer is to be lost; 0: none.
    to_lose: u64,
    replies_lost: u64,
}

impl State {
    fn holds(&self, direction: Direction) -> bool {
        match direction {
            Direction::ToServer => self.hold_requests,
            Direction::ToClient => self.hold_answers,
        }
    }

    fn pieces(&self, direction: Direction) -> u64 {
        match direction {
            Direction::ToServer => self.requests,
            Direction::ToClient => self.answers,
        }
    }
}

impl Proxy {
    /// Listens on a free port, before the server at this address, such as `127.0.0.1:5432`.
    ///
    /// # Errors
    ///
    /// No port can be had.
    pub async fn start(server: impl Into<String>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared {
            server: server.into(),
            state: watch::Sender::default(),
            round_trips: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared))).abort_handle();
        Ok(Self { port, shared, accepting })
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How often requests went out after an answer, or as the first thing, on all connections. Requests that are sent one after
    /// the other without waiting count once.
    pub fn round_trips(&self) -> u64 {
        self.shared.round_trips.load(Ordering::SeqCst)
    }

    /// How many connections were made.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Keeps back what is sent in this direction from now on, on every connection, until [`release`](Self::release). To both ends
    /// the network looks alive and silent.
    pub fn hold(&self, direction: Direction) {
        self.shared.state.send_modify(|state| match direction {
            Direction::ToServer => state.hold_requests = true,
            Direction::ToClient => state.hold_answers = true,
        });
    }

    /// Sends on what was kept back, and nothing is kept back any more.
    pub fn release(&self) {
        self.shared.state.send_modify(|state| (state.hold_requests, state.hold_answers) = (false, false));
    }

    /// Closes every connection now; what was kept back is lost. New connections can be made.
    pub fn cut(&self) {
        self.shared.state.send_modify(|state| state.generation += 1);
    }

    /// Loses one answer: of the `nth` round trip from now on, counted from 1 as [`round_trips`](Self::round_trips) does. The request goes
    /// to the server and is carried out there; when the answer begins to arrive it is dropped, and every connection is cut. New ones can
    /// be made, and what follows goes through. Called again, it counts anew; 0 calls it off.
    ///
    /// ```
    /// # async fn example(proxy: queue_conformance::Proxy, call: impl Future<Output = std::io::Result<()>>) {
    /// proxy.lose_reply(2);
    /// let answer = call.await;
    /// if proxy.replies_lost() == 0 {
    ///     println!("it goes to the server once, at most, and ends with {answer:?}");
    /// }
    /// # }
    /// ```
    pub fn lose_reply(&self, nth: u64) {
        self.shared.state.send_modify(|state| state.to_lose = nth);
    }

    /// How many answers [`lose_reply`](Self::lose_reply) has lost so far. Whoever was told of the cut finds its own among them.
    pub fn replies_lost(&self) -> u64 {
        self.shared.state.borrow().replies_lost
    }

    /// Resolves when `meanwhile` has made something arrive in this direction, kept back or not. Whatever `meanwhile` is, it is
    /// polled until then, and dropped: a call that is given up at this moment.
    pub async fn until_arrival(&self, direction: Direction, meanwhile: impl Future) {
        let mut state = self.shared.state.subscribe();
        let before = state.borrow().pieces(direction);
        let arrived = state.wait_for(|state| state.pieces(direction) > before);
        tokio::select! {
            _ = arrived => {}
            _ = async { meanwhile.await; std::future::pending::<()>().await } => {}
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, and with it the connections.
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        shared.connections.fetch_add(1, Ordering::SeqCst);
        connections.spawn(connect(client, Arc::clone(&shared)));
        while connections.try_join_next().is_some() {}
    }
}

async fn connect(client: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    let mut state = shared.state.subscribe();
    let generation = state.borrow().generation;
    let server = TcpStream::connect(&shared.server).await?;
    // What is forwarded is not held up to be sent together with what follows.
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let turn = Turn { answered: AtomicBool::new(true), loses: AtomicBool::new(false) };
    tokio::select! {
        _ = state.wait_for(|state| state.generation > generation) => Ok(()),
        ended = forward(from_client, to_server, Direction::ToServer, &shared, generation, &turn) => ended,
        ended = forward(from_server, to_client, Direction::ToClient, &shared, generation, &turn) => ended,
    }
}

/// Where a connection is in its round trips.
struct Turn {
    /// Whether the last thing that went through was an answer.
    answered: AtomicBool,
    /// Whether the next answer is to be lost.
    loses: AtomicBool,
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    direction: Direction,
    shared: &Shared,
    generation: u64,
    turn: &Turn,
) -> io::Result<()> {
    let mut state = shared.state.subscribe();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let bytes = from.read(&mut buffer).await?;
        if bytes == 0 {
            return Ok(());
        }
        let was_answered = turn.answered.swap(direction == Direction::ToClient, Ordering::SeqCst);
        let begins = direction == Direction::ToServer && was_answered;
        if begins {
            shared.round_trips.fetch_add(1, Ordering::SeqCst);
        }
        shared.state.send_modify(|state| match direction {
            Direction::ToServer => {
                state.requests += 1;
                if begins && state.to_lose > 0 {
                    state.to_lose -= 1;
                    turn.loses.store(state.to_lose == 0, Ordering::SeqCst);
                }
            }
            Direction::ToClient => {
                state.answers += 1;
                if turn.loses.swap(false, Ordering::SeqCst) {
                    state.replies_lost += 1;
                    state.generation += 1;
                }
            }
        });
        // What was kept back when the connections were cut is lost, also if everything is released in the same moment.
        let go_on = state.wait_for(|state| state.generation > generation || !state.holds(direction)).await;
        if go_on.map_or(true, |state| state.generation > generation) {
            return Ok(());
        }
        to.write_all(&buffer[..bytes]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every piece with itself.
    async fn echo() -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = client.split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        address
    }

    async fn client(proxy: &Proxy) -> TcpStream {
        TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).await.expect("connects")
    }

    async fn ask(client: &mut TcpStream) -> io::Result<u8> {
        client.write_u8(7).await?;
        client.read_u8().await
    }

    #[tokio::test]
    async fn round_trips_are_counted() {
        let proxy = Proxy::start(echo().await).await.expect("starts");
        let (mut one, mut two) = (client(&proxy).await, client(&proxy).await);
        for _ in 0..3 {
            ask(&mut one).await.expect("an answer");
        }
        ask(&mut two).await.expect("an answer");
        assert_eq!((proxy.round_trips(), proxy.connections()), (4, 2));
    }

    #[tokio::test]
    async fn what_is_held_comes_later_or_never() {
        let proxy = Proxy::start(echo().await).await.expect("starts");
        let mut client = client(&proxy).await;
        proxy.hold(Direction::ToClient);
        proxy.until_arrival(Direction::ToClient, ask(&mut client)).await;
        proxy.release();
        assert_eq!(client.read_u8().await.expect("the answer that was held"), 7);
        proxy.hold(Direction::ToServer);
        proxy.until_arrival(Direction::ToServer, ask(&mut client)).await;
        proxy.cut();
        proxy.release();
        assert!(client.read_u8().await.is_err(), "the connection is gone");
    }

    #[tokio::test]
    async fn one_reply_is_lost_after_the_server_has_sent_it() {
        let proxy = Proxy::start(echo().await).await.expect("starts");
        let (mut one, mut two) = (client(&proxy).await, client(&proxy).await);
        ask(&mut one).await.expect("before");
        proxy.lose_reply(3);
        ask(&mut one).await.expect("the first");
        ask(&mut two).await.expect("the second");
        assert_eq!(proxy.replies_lost(), 0);
        assert!(ask(&mut one).await.is_err(), "the third");
        assert_eq!(proxy.replies_lost(), 1);
        assert!(two.read_u8().await.is_err(), "every connection is cut");
        let mut later = client(&proxy).await;
        for _ in 0..5 {
            ask(&mut later).await.expect("nothing more is lost");
        }
        proxy.lose_reply(1);
        proxy.lose_reply(0);
        ask(&mut later).await.expect("it was called off");
        assert_eq!(proxy.replies_lost(), 1);
    }
}
