import type { Setting, ValuesIn } from '../../config/setting.js'

export const alertSettings = {
  webhookUrl: {
    name: 'ALERT_WEBHOOK_URL',
    type: 'url',
    protocols: ['http:', 'https:'],
    default: null,
    secret: true,
    meaning: 'where alerts are sent',
  },
  webhookSecret: {
    name: 'ALERT_WEBHOOK_SECRET',
    type: 'text',
    pattern: /^[^\0]{8,1024}$/u,
    allowed: '8 to 1,024 characters',
    default: null,
    secret: true,
    meaning: 'key of the signature on alerts (X-Spillway-Signature)',
  },
} as const satisfies Readonly<Record<string, Setting>>

export function doubtfulAlerts({ webhookUrl, webhookSecret }: ValuesIn<typeof alertSettings>): string[] {
  if (webhookSecret === null || webhookUrl !== null) return []
  return ['ALERT_WEBHOOK_SECRET is set without ALERT_WEBHOOK_URL: no alert is sent anywhere']
}
