/**
 * The closed list of problem codes. A code never changes its meaning; clients switch on it, never on the texts.
 * `docs/errors.md` lists the same codes; `npm run check` compares the two.
 */
export const problems = {
  invalid_request: { status: 400, title: 'Invalid Request' },
  unauthenticated: { status: 401, title: 'Authentication Required' },
  forbidden: { status: 403, title: 'Forbidden' },
  target_not_allowed: { status: 403, title: 'Target Not Allowed' },
  not_found: { status: 404, title: 'Not Found' },
  method_not_allowed: { status: 405, title: 'Method Not Allowed' },
  request_timeout: { status: 408, title: 'Request Timeout' },
  conflict: { status: 409, title: 'Conflict' },
  idempotency_in_progress: { status: 409, title: 'First Request Still In Progress' },
  operation_running: { status: 409, title: 'Operation Is Running' },
  operation_not_failed: { status: 409, title: 'Operation Has Not Failed' },
  operation_finished: { status: 409, title: 'Operation Is Finished' },
  body_too_large: { status: 413, title: 'Body Too Large' },
  unsupported_media_type: { status: 415, title: 'Unsupported Media Type' },
  idempotency_mismatch: { status: 422, title: 'Idempotency Key Used For Another Body' },
  rate_limited: { status: 429, title: 'Rate Limit Exceeded' },
  connection_limit: { status: 429, title: 'Too Many Connections' },
  header_fields_too_large: { status: 431, title: 'Header Fields Too Large' },
  internal_error: { status: 500, title: 'Internal Error' },
  capacity_exceeded: { status: 503, title: 'Capacity Exceeded' },
  queue_full: { status: 503, title: 'Queue Full' },
  system_overloaded: { status: 429, title: 'System Overloaded' },
  overloaded: { status: 503, title: 'Overloaded' },
  halted: { status: 503, title: 'Halted' },
  store_unavailable: { status: 503, title: 'Store Unavailable' },
  draining: { status: 503, title: 'Shutting Down' },
  not_ready: { status: 503, title: 'Not Ready' },
  authentication_unavailable: { status: 503, title: 'Authentication Unavailable' },
} as const

export type ProblemCode = keyof typeof problems
