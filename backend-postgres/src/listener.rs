//! The connection on which other processes wake this one.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use queue_core::WorkSignal;
use sqlx::PgPool;
use sqlx::postgres::PgListener;
use sqlx::postgres::PgPoolOptions;
use sqlx::raw_sql;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio::time::timeout;

/// Listens in the background, from the first time that somebody waits until it is dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Whose options to connect with. None of its connections is used: it may be the application's only one.
    pool: PgPool,
    channel: String,
    signal: WorkSignal,
    silence: Duration,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Listener {
    /// How long a connection may be silent before it is asked whether it is there.
    const SILENCE: Duration = Duration::from_secs(30);
    const LONGEST_PAUSE: Duration = Duration::from_secs(30);

    pub(crate) fn new(pool: PgPool, channel: String, signal: WorkSignal) -> Self {
        Self { pool, channel, signal, silence: Self::SILENCE, task: Mutex::default() }
    }

    /// Begins to listen, unless it does, or the handle has been closed.
    pub(crate) fn start(&self) {
        if self.pool.is_closed() {
            return;
        }
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        // It ends by itself only with the runtime that it was started in.
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            let (pool, channel, signal) = (self.pool.clone(), self.channel.clone(), self.signal.clone());
            *task = Some(tokio::spawn(listen(pool, channel, signal, self.silence)));
        }
    }

    /// Ends it, and its connection.
    pub(crate) fn stop(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn listen(pool: PgPool, channel: String, signal: WorkSignal, silence: Duration) {
    let mut pause = Duration::from_millis(50);
    loop {
        match connect(&pool, &channel, silence).await {
            Ok(mut listener) => {
                tracing::debug!(channel, "listening for work");
                pause = Duration::from_millis(50);
                // Whatever was enqueued while nobody listened.
                signal.notify();
                let error = receive(&mut listener, &signal, silence).await;
                tracing::warn!(channel, error, "the connection that listens for work was lost");
            }
            Err(error) => tracing::warn!(channel, error, "listening for work failed; workers poll meanwhile"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(Listener::LONGEST_PAUSE);
    }
}

async fn connect(pool: &PgPool, channel: &str, silence: Duration) -> Result<PgListener, String> {
    let connecting = async {
        let own = PgPoolOptions::new().max_connections(1).idle_timeout(None).max_lifetime(None);
        // As they are now: a password may have changed.
        let own = own.connect_lazy_with((*pool.connect_options()).clone());
        let mut listener = PgListener::connect_with(&own).await?;
        listener.eager_reconnect(false);
        listener.listen(channel).await?;
        sqlx::Result::Ok(listener)
    };
    match timeout(silence, connecting).await {
        Ok(listener) => listener.map_err(|error: sqlx::Error| error.to_string()),
        Err(_) => Err("no answer".to_owned()),
    }
}

/// Wakes for each notification, until the connection is lost; answers why.
async fn receive(listener: &mut PgListener, signal: &WorkSignal, silence: Duration) -> String {
    loop {
        match timeout(silence, listener.try_recv()).await {
            Ok(Ok(Some(_))) => signal.notify(),
            Ok(Ok(None)) => return "closed".to_owned(),
            Ok(Err(error)) => return error.to_string(),
            // A network that swallows everything looks like one on which nothing happens.
            Err(_) => match timeout(silence, raw_sql("SELECT 1").execute(&mut *listener)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return error.to_string(),
                Err(_) => return "no answer".to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use queue_conformance::Direction;
    use queue_conformance::Proxy;
    use sqlx::postgres::PgConnectOptions;

    use super::*;

    /// F6: a connection that swallows everything is asked, given up, and replaced, though nobody cuts it.
    #[tokio::test]
    async fn a_connection_that_is_silent_is_replaced() {
        let url = std::env::var("TEST_POSTGRES_URL");
        let url = url.expect("TEST_POSTGRES_URL is not set: scripts/test.sh starts the servers and sets it");
        let server: PgConnectOptions = url.parse().expect("a URL");
        let proxy = Proxy::start(format!("{}:{}", server.get_host(), server.get_port())).await.expect("a proxy");
        let pool = PgPoolOptions::new().connect_lazy_with(server.host("127.0.0.1").port(proxy.port()));
        let signal = WorkSignal::default();
        let mut listener = Listener::new(pool, "a channel".to_owned(), signal.clone());
        listener.silence = Duration::from_millis(100);
        let connected = signal.wait();
        listener.start();
        connected.await;
        proxy.hold(Direction::ToClient);
        // The dead one, and at least one that did not come about.
        while proxy.connections() < 2 {
            tokio::task::yield_now().await;
        }
        let back = signal.wait();
        proxy.release();
        back.await;
    }
}
